"""Which columns distinguish cells, what cells are called, and which cell a user means."""

import pytest
from pandas import DataFrame

from tests.builders import run, table
from vitsweep.errors import BadValueError
from vitsweep.results.record import Status
from vitsweep.tables import names
from vitsweep.tables.cells import cells
from vitsweep.tables.names import (
    baseline_settings,
    cell_names,
    find_cell,
    in_menu_order,
    name_parts,
    names_by_id,
    series_names,
    varying_columns,
    with_changes,
)


def of(base: str | None = "a", **specs: dict[str, object]) -> DataFrame:
    runs = [run(cell, **spec) for cell, spec in specs.items()]  # type: ignore[arg-type]
    return cells(table(*runs), dict.fromkeys(specs, base))


def test_columns_that_vary_and_say_something_new_distinguish_cells() -> None:
    for wanted, facts in (
        ([], {}),
        (["precision"], {"precision": "O1"}),
        (["precision", "sharding"], {"sharding": "fsdp", "precision": "O1"}),
        (["world_size"], {"world_size": 4, "nodes": 2, "ranks_per_node": 2}),
        (["resolution_px"], {"resolution_px": 16, "num_tokens": 65}),
        (["num_tokens"], {"num_tokens": 65}),
        (["batch"], {"batch": "blog_560", "images_per_step": 560}),
        (["optimizer.momentum"], {"optimizer.momentum": 0.5}),
        (["precision"], {"precision": "O1", "precision.loss_scale": 8.0}),
        ([], {"measurement": "smoke", "measurement.blocks": 3}),
    ):
        found = table(run("a"), run("b", **facts))  # type: ignore[arg-type]
        assert varying_columns(found) == wanted, facts


def test_a_cell_is_named_by_what_it_changes() -> None:
    found = of(a={}, b={"precision": "O1"}, c={"precision": "O1", "sharding": "fsdp"})
    assert cell_names(found).tolist() == ["baseline", "O1", "O1 + fsdp"]
    assert names_by_id(found) == {"a": "baseline", "b": "O1", "c": "O1 + fsdp"}
    assert baseline_settings(found) == "fp32 · ddp"
    assert baseline_settings(found.drop(columns="baseline_cell_id")) == ""
    assert baseline_settings(of(None, a={}, b={"precision": "O1"})) == ""
    without = of(None, a={}, b={"precision": "O1", "sharding": "fsdp"})
    assert cell_names(without).tolist() == ["fp32 · ddp", "O1 · fsdp"]
    assert cell_names(of(a={})).tolist() == ["baseline"]
    assert cell_names(of(None, a={"precision": "O1"})).tolist() == ["O1"]
    assert cell_names(of(None, a={})).tolist() == ["vit_nano"]
    assert series_names(found, ["sharding"]).tolist() == ["baseline", "baseline", "fsdp"]


def test_where_baselines_differ_a_name_has_its_setting() -> None:
    sizes = [{"world_size": n, "ranks_per_node": n} for n in (2, 4)]
    runs = [
        run(f"{c}{n}", precision=p, **size)
        for n, size in enumerate(sizes)
        for c, p in (("a", "fp32"), ("b", "O1"))
    ]
    found = cells(table(*runs), {r.cell_id: f"a{r.cell_id[1]}" for r in runs})
    parts = name_parts(found).set_axis(found["cell_id"]).sort_index()
    assert parts["change"].tolist() == ["baseline", "baseline", "O1", "O1"]
    assert parts["match"].tolist() == ["2 ranks", "4 ranks"] * 2
    assert parts["name"].tolist() == [
        "baseline · 2 ranks",
        "baseline · 4 ranks",
        "O1 · 2 ranks",
        "O1 · 4 ranks",
    ]
    alone = cells(table(*runs[::2]), {"a0": "a0", "a1": "a1"})
    assert cell_names(alone).tolist() == ["2 ranks", "4 ranks"]


def test_cells_that_no_column_distinguishes_have_their_ids() -> None:
    found = of(None, a={}, b={}, c={"precision": "O1"})
    assert dict(zip(found["cell_id"], cell_names(found), strict=True)) == {
        "a": "fp32 · a", "b": "fp32 · b", "c": "O1",
    }  # fmt: skip


def test_changes_are_counted_against_the_baseline() -> None:
    found = with_changes(of(a={}, b={"precision": "O1", "sharding": "fsdp"}))
    assert found["changes"].tolist() == [frozenset(), {"precision=O1", "sharding=fsdp"}]
    assert [names.named(changes) for changes in found["changes"]] == [
        "baseline",
        "precision=O1 + sharding=fsdp",
    ]
    assert names.named(frozenset({"x=1", "sharding=fsdp", "a=2"})) == "sharding=fsdp + a=2 + x=1"
    assert names.short("precision=O1 + mesh.ring=2 + baseline") == "O1 + ring=2 + baseline"
    assert with_changes(of("gone", a={})).empty


def test_choices_are_in_the_order_of_the_menu() -> None:
    assert in_menu_order("precision", ["zz", "O1", "fp32", "aa"]) == ["fp32", "O1", "aa", "zz"]
    assert in_menu_order("status", ["failed", "measured"])[0] == "measured"


def test_a_cell_is_found_by_id_name_or_settings() -> None:
    found = of(
        a={}, b={"precision": "O1"}, c={"precision": "O1", "sharding": "fsdp"},
        d={"precision": "O2", "sharding": "fsdp"}, e={"precision": "O2", "sharding": "zero1"},
    )  # fmt: skip
    for typed, cell in (
        ("c", "c"), ("baseline", "a"), ("O1 + fsdp", "c"), ("O1", "b"), ("precision=O1", "b"), ("", "a"),
        ("O1 fsdp", "c"), ("fsdp · O2", "d"), ("zero1", "e"), ("sharding=fsdp precision=O2", "d"),
        ("model=vit_nano", "a"),
    ):  # fmt: skip
        assert find_cell(found, typed) == cell, typed
    for typed in ("O2", "O9", "precision=O1 zero1", "nosuch=1"):
        with pytest.raises(BadValueError, match=f"`{typed}`"):
            find_cell(found, typed)
    assert sorted(names.cells_named(found, "O2")["cell_id"]) == ["d", "e"]
    assert find_cell(of(a={}), "vit_nano") == "a"


def test_columns_of_a_table_are_distinguished_by_kind() -> None:
    found = of(a={}, b={"precision": "O1", "status": Status.measured})
    assert {"device", "torch", "git_commit"} <= {*names.environment_columns(found)}
    kinds = [
        names.spec_columns(found),
        names.metric_columns(found),
        names.environment_columns(found),
    ]
    assert not {*kinds[0]} & {*kinds[1]}
    assert not {*kinds[2]} & {*kinds[0], *kinds[1], "cell_id", "speedup", "oversubscribed"}
    assert {"precision", "world_size", "precision.master_weights"} <= {*kinds[0]}
