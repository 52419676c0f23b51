from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from pandas import DataFrame

from tests.builders import PLAIN, run, table
from tests.cells import entry
from vitsweep.execution.run_request import frozen_document
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels, cell_table
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.tables.cells import cells
from vitsweep.tables.load import cells_of
from vitsweep.tables.names import (
    baseline_settings,
    cell_names,
    name_parts,
    names_by_id,
    varying_columns,
)
from vitsweep.tables.valid_runs import final_status

BASELINES = {"base": "base", "fast": "base"}


def test_one_row_per_cell_with_medians_and_spread():
    runs = table(
        *[
            run("base", f"b{i}", s, metrics={"peak_rss_gib": s / 100})
            for i, s in enumerate([90, 100, 150])
        ],
        *[run("fast", f"b{i}", s, precision="O2") for i, s in enumerate([180, 200, 300])],
    )
    result = cells(runs, BASELINES).set_index("cell_id")
    assert result.index.tolist() == ["base", "fast"]
    assert result.loc["base", "images_per_second"] == 100
    assert result.loc["base", ["peak_rss_gib", "peak_gib"]].tolist() == pytest.approx([1.0, 1.0])
    assert result.loc["base", "throughput_spread"] == pytest.approx(
        pd.Series([90, 100, 150]).std() / 113.3333, rel=1e-4
    )
    assert result.loc["fast", "speedup"] == pytest.approx(2.0)
    assert result.loc["fast", "precision"] == "O2"
    assert result["blocks"].tolist() == [3, 3]
    assert result["num_pairs"].tolist() == [0, 3]


def test_what_instruments_found_in_earlier_runs_is_that_of_the_cell() -> None:
    """Later runs of a cell may have none; where they have, the latest counts."""
    kernels = ["math", "flash", None]
    runs = [
        run("base", f"b{n}", 100.0, metrics={"forward_ms": ms}, environment={"attention_kernel": k})
        for n, (ms, k) in enumerate(zip([10.0, 14.0, None], kernels, strict=True))
    ]
    row = cells(table(*runs), {"base": None}).iloc[0]
    assert (row["attention_kernel"], row["blocks"]) == ("flash", 3)
    assert row["forward_ms"] == 12.0


def test_step_time_and_throughput_of_a_row_agree_over_an_even_number_of_uneven_runs():
    runs = table(
        *[run("base", f"b{i}", s, images_per_step=16) for i, s in enumerate([1000, 1010])],
        *[run("fast", f"b{i}", s, images_per_step=16) for i, s in enumerate([1020, 34])],
    )
    for row in cells(runs, BASELINES).to_dict("records"):
        assert row["step_time_ms"] == pytest.approx(16_000 / row["images_per_second"])
        assert row["epoch_hours_imagenet1k"] == pytest.approx(
            1_281_167 / row["images_per_second"] / 3600
        )


def test_cells_that_no_column_distinguishes_are_named_by_their_ids():
    runs = table(run("a", precision="O1"), run("b", precision="O1"), run("c", precision="O2"))
    assert cell_names(cells(runs, {})).tolist() == ["O1 · a", "O1 · b", "O2"]


def test_names_are_found_once_per_table_and_anew_for_what_is_made_from_it() -> None:
    of_three = cells(table(run("a"), run("b", precision="O1"), run("c", precision="O2")), {})
    assert name_parts(of_three) is name_parts(of_three)
    assert varying_columns(of_three) is varying_columns(of_three)
    assert cell_names(of_three).tolist() == ["fp32", "O1", "O2"]
    assert cell_names(of_three.assign(sharding=["ddp", "fsdp", "fsdp"])).iloc[1] == "O1 · fsdp"
    assert varying_columns(of_three.iloc[:1]) == []


def test_a_name_is_the_difference_from_the_baseline_whichever_cells_are_next_to_it() -> None:
    """The baseline is `baseline`; a cell without one is named by the same difference, or is whole."""
    one = [
        run("base"), run("a", precision="O1"), run("b", precision="O1", optimizer="adamw_fused"),
        run("c", sharding="fsdp", **{"sharding.degree": 4}),
    ]  # fmt: skip
    of_one = dict.fromkeys("abc", "base") | {"base": "base"}
    names = {"base": "baseline", "a": "O1", "b": "O1 + adamw_fused", "c": "fsdp"}
    assert names_by_id(cells(table(*one), of_one)) == names
    assert names_by_id(cells(table(*one[:2]), of_one)) == {"base": "baseline", "a": "O1"}
    assert names_by_id(cells(table(*one), of_one | {"b": None})) == names
    assert baseline_settings(cells(table(*one), of_one)) == "fp32 · ddp · adamw_loop"
    two = [*one, run("base4", world_size=4), run("d", world_size=4, precision="O1")]
    found = names_by_id(cells(table(*two), of_one | dict.fromkeys(("base4", "d"), "base4")))
    assert found == {key: f"{name} · 2 ranks" for key, name in names.items()} | {
        "base4": "baseline · 4 ranks", "d": "O1 · 4 ranks"
    }  # fmt: skip
    own = {"base": "base", "base4": "base4"}
    assert names_by_id(cells(table(one[0], two[-2]), own)) == {
        "base": "2 ranks",
        "base4": "4 ranks",
    }
    assert cell_names(cells(table(two[-1]), {})).tolist() == ["O1"]


def test_tokens_are_part_of_a_name_where_no_other_choice_changed_them() -> None:
    cells_ = [
        run("base", num_tokens=17),
        run("a", num_tokens=16, classifier="pooled"),
        run("b", num_tokens=65),
    ]
    names = names_by_id(cells(table(*cells_), dict.fromkeys(("base", "a", "b"), "base")))
    assert names == {"base": "baseline", "a": "pooled", "b": "65 tokens"}


def test_a_plan_names_cells_as_the_tables_do() -> None:
    composed = [("precision=O1",), ("precision=O1", "model.depth=3"), ()]
    entries = [replace(entry(*o), baseline_id=entry().cell_id) for o in composed]
    labels = cell_labels(SweepPlan({e.cell_id: e for e in entries}))
    assert list(labels.values()) == ["O1", "O1 + depth=3", "baseline"]
    runs = [replace(run(e.cell_id, "b0", 100), spec=flatten(e.spec)) for e in entries]
    assert names_by_id(cells(table(*runs), dict.fromkeys(labels, entries[-1].cell_id))) == labels


def test_a_batch_of_another_size_than_its_choice_says_is_named_with_it() -> None:
    blog = ("batch=blog_560", "batch.images_per_step=70")
    same, named = ("batch.images_per_step=64",), "blog_560 + 64 images"
    for own, base, name in (
        (blog, (), "blog_560 + 70 images"),
        (blog[:1], (), "blog_560"),
        ((*blog[:1], *same), same, named),
    ):
        entries = [replace(entry(*o), baseline_id=entry(*base).cell_id) for o in (own, base)]
        plan = SweepPlan({e.cell_id: e for e in entries})
        assert [*cell_labels(plan).values()] == [name, "baseline"]
        assert "images_per_step" not in varying_columns(cell_table(plan)), "no effect of its own"


def test_cells_that_never_ran_keep_the_names_of_the_plan(tmp_path: Path) -> None:
    """However few have run when a command is stopped, the baseline or another one."""
    composed = [
        ("precision=O1",),
        ("precision=O1", "model.depth=3"),
        ("batch.images_per_step=8",),
        (),
    ]
    entries = [replace(entry(*o), baseline_id=entry().cell_id) for o in composed]
    plan = SweepPlan({e.cell_id: e for e in entries})
    for ran in ([], [0], [1, 2], [3], [0, 1, 2]):
        store = Store(tmp_path / "".join(map(str, ran))).create()
        store.append_command({"cells": [*plan.entries], "baselines": plan.baselines})
        for e in entries:
            store.freeze(e.cell_id, frozen_document(e.spec, e.tree, (), {}))
        for e in (entries[i] for i in ran):
            store.save_run(replace(run(e.cell_id, "b0", 100), spec=flatten(e.spec)))
        assert names_by_id(cells_of(store)) == cell_labels(plan), ran


def test_columns_come_in_the_order_of_the_record():
    order = list(cells(table(run("base"), run("fast")), BASELINES))
    marks = ["cell_id", "status", "precision", "world_size", "images_per_second", "speedup"]
    marks += [
        "baseline_cell_id",
        "epoch_hours_imagenet1k",
        "oversubscribed",
        "device",
        "started_at",
    ]
    assert [c for c in order if c in marks] == marks
    assert "run_id" not in order


def test_a_killed_block_does_not_take_away_measured_ones():
    runs = table(
        run("base", "b0", 100), run("base", "b1", status=Status.killed, reason="SIGKILL", minute=5)
    )
    row = final_status(runs).iloc[0]
    assert (row["status"], row["reason"]) == ("measured", "")


def test_a_later_wrong_run_disqualifies_and_a_later_measured_one_restores():
    runs = [
        run("base", "b0", 100),
        run("base", "b1", status=Status.wrong, reason="differs", minute=5),
    ]
    assert final_status(table(*runs)).iloc[0]["status"] == "wrong"
    assert (
        final_status(table(*runs, run("base", "b2", 100, minute=9))).iloc[0]["status"] == "measured"
    )


def test_a_cell_that_was_never_measured_has_the_status_of_its_latest_run():
    runs = table(
        run("base", "b0", status=Status.preempted, reason="node taken", minute=1),
        run(
            "base",
            "b1",
            status=Status.out_of_memory,
            reason="rank 1",
            minute=2,
            metrics={"peak_rss_gib": 7.5},
        ),
    )
    row = cells(runs, BASELINES).iloc[0]
    assert (row["status"], row["reason"], row["blocks"]) == ("out_of_memory", "rank 1", 0)
    assert row["peak_rss_gib"] == 7.5
    assert pd.isna(row["images_per_second"])


def test_invalid_cells_are_rows_as_well():
    refused = DataFrame(
        [{"cell_id": "bad", "status": "invalid", "reason": "needs a GPU", "precision": "fp8"}]
    )
    result = cells(table(run("base")), BASELINES, refused).set_index("cell_id")
    assert result.loc["bad", ["status", "precision"]].tolist() == ["invalid", "fp8"]
    assert cells(DataFrame(), {}, refused)["cell_id"].tolist() == ["bad"]


def test_a_flag_of_one_run_marks_the_cell():
    runs = table(run("base", "b0"), run("base", "b1", validity={"throttled": True}))
    assert bool(cells(runs, BASELINES).iloc[0]["throttled"])


@pytest.mark.parametrize(("drifting", "cell_drifts"), [(1, False), (2, False), (3, True)])
def test_a_cell_drifts_when_most_of_its_runs_do(drifting: int, cell_drifts: bool):
    runs = [run("base", f"b{i}", validity={"drifting": i < drifting}) for i in range(4)]
    assert bool(cells(table(*runs), BASELINES).iloc[0]["drifting"]) is cell_drifts


def test_only_columns_that_distinguish_cells_vary():
    runs = table(
        run("a"),
        run("b", precision="O2", **{"precision.master_weights": True}),
        run("c", precision="O2", sharding="fsdp", **{"precision.master_weights": True}),
        run(
            "d",
            precision="O2",
            sharding="fsdp",
            measurement="smoke",
            **{"precision.master_weights": False},
        ),
    )
    assert varying_columns(runs) == ["precision", "sharding", "precision.master_weights"]


def test_a_cell_that_never_ran_makes_no_field_vary():
    """Its choices alone are known."""
    ran = {"world_size": 2, "model.target": "mine.build", "optimizer.momentum": 0.9}
    waiting = PLAIN | {"cell_id": "c", "status": "not run", "sharding": "zero1"}
    del waiting["world_size"]
    known = table(run("a", **ran), run("b", sharding="fsdp", **ran))
    assert varying_columns(pd.concat([known, DataFrame([waiting])])) == ["sharding"]


def test_fields_that_were_set_together_are_all_shown() -> None:
    def cell(name: str, rate: float, decay: float, images: int, pixels: int) -> RunRecord:
        fields = {"optimizer.learning_rate": rate, "optimizer.weight_decay": decay}
        sizes = {"images_per_step": images, "resolution_px": pixels, "num_tokens": pixels**2}
        return run(name, **sizes, **fields)

    runs = table(cell("a", 0.1, 0, 64, 8), cell("b", 0.2, 0.5, 64, 8), cell("c", 0.2, 0.5, 16, 16))
    sizes = ["images_per_step", "resolution_px"]
    assert varying_columns(runs) == [*sizes, "optimizer.learning_rate", "optimizer.weight_decay"]


def test_a_field_set_with_another_choice_is_part_of_the_name() -> None:
    """What `resolve` fills by another choice, and what a refused cell lacks, is not."""
    cut, eps = "layout.patch_embedding", "optimizer.eps"
    runs = table(
        run("base", **{cut: "convolution", eps: 1e-8}),
        run("a", precision="O3", **{cut: "convolution", eps: 1e-4}),
        run("b", precision="O1", **{cut: "linear", eps: 1e-8}),
        run("c", sharding="fsdp", **{eps: 1e-8}),
    )
    names = names_by_id(cells(runs, dict.fromkeys("abc", "base") | {"base": "base"}))
    assert [names[key] for key in "ab"] == ["O3", "O1 + patch_embedding=linear"]
    assert varying_columns(runs) == ["precision", "sharding", cut]


def test_a_field_typed_with_choices_that_vary_is_part_of_their_names() -> None:
    """What the YAML of each choice says is not: `sgd_loop` has another learning rate."""
    rate, decay = "optimizer.learning_rate", "optimizer.weight_decay"
    rows = [("adamw_loop", 1e-3, 0.05), ("adamw_fused", 1e-4, 0.05), ("sgd_loop", 0.1, 0.0005)]
    runs = table(*(run(name, optimizer=name, **{rate: lr, decay: kept}) for name, lr, kept in rows))
    names = names_by_id(cells(runs, dict.fromkeys((name for name, *_ in rows), "adamw_loop")))
    assert names["adamw_fused"] == "adamw_fused + learning_rate=0.0001"
    assert varying_columns(runs) == ["optimizer", rate]
    assert varying_columns(runs[runs["optimizer"] != "adamw_fused"]) == ["optimizer"]


@pytest.mark.parametrize(
    ("causes", "flagged"), [(["data", "data", None], True), (["data", None, None], False)]
)
def test_steps_are_uneven_where_most_runs_say_so_with_the_cause(causes, flagged) -> None:
    runs = table(
        *(
            run("base", f"b{n}", validity={"uneven_steps": bool(c), "uneven_steps_cause": c})
            for n, c in enumerate(causes)
        )
    )
    row = cells(runs, BASELINES).iloc[0]
    assert bool(row["uneven_steps"]) is flagged
    assert row["uneven_steps_cause"] == "data" if flagged else pd.isna(row["uneven_steps_cause"])
