"""What charts share: colours and looks, labels, which series are drawn, and the caption."""

from itertools import pairwise

import pytest
from matplotlib.lines import Line2D
from pandas import DataFrame, Series

from tests.builders import run, table
from vitsweep.charts import style
from vitsweep.charts.style import Chart
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import choices
from vitsweep.tables.cells import cells

NAN = float("nan")


def of_choices(*precisions: str, base: str = "", **facts: object) -> DataFrame:
    """Cells of these precisions; those of one have the same throughput, in falling order."""
    runs = [
        run(f"c{n}", "b0", 100.0 - n, precision=name, **facts)  # type: ignore[arg-type]
        for n, name in enumerate(precisions)
    ]
    return cells(table(*runs), dict.fromkeys((r.cell_id for r in runs), base or None))


def test_choices_of_a_group_follow_one_another_in_the_palette() -> None:
    for group in GROUPS:
        places = [style.place(group, choice) for choice in choices(group)]
        assert {(b - a) % 8 for a, b in pairwise(places)} <= {1}
    first = {
        group: style.place(group, choices(group)[0])
        for group in ("precision", "memory", "tensor_parallel")
    }
    assert first == {"precision": 0, "memory": 1, "tensor_parallel": 7}
    by_name = [style.place(*of) for of in (("precision", "nosuch"), ("data", "digits"), ("x", "y"))]
    assert by_name == [0, 4, 2], "the same on every day"
    assert style.colour("memory", choices("memory")[0]) == style.PALETTE[1]


def test_the_size_of_a_chart_follows_its_rows_and_the_width_of_a_label_its_length() -> None:
    assert [style.height(n) for n in (0, 1, 2, 3)] == pytest.approx([1.98, 1.98, 1.98, 2.32])
    assert tuple(style.new_figure()[0].get_size_inches()) == (8, 4)
    for words, widths in ((9, [44]), (10, [44, 4]), (15, [44, 29]), (19, [54, 39]), (30, [79, 69])):
        lines = style.folded(" ".join(["aaaa"] * words)).splitlines()
        assert [len(line) for line in lines] == widths
    assert style.axis_label("step_time_ms") == "Step time (ms)"
    assert style.axis_label("num_of_cells") == "num of cells"


def test_parts_that_distinguish_no_label_are_left_out_where_one_is_too_long() -> None:
    long = ["O1 · vit · 1 rank", "O2 · vit · 2 ranks"]
    assert style.shorten(long, 18) == long
    assert style.shorten(long, 17) == ["O1 · vit", "O2 · vit"]
    one = ["O1 · vit · 1 rank", "O1 · vit · 2 ranks"]
    assert style.shorten(one, 18) == one
    assert style.shorten(one, 17) == ["O1 · 1 rank", "O1 · 2 ranks"]
    assert style.shorten([*one, "O1"], 17) == [one[0], "O1 · vit… 2 ranks", "O1"]
    assert style.shorten([], 5) == []


def test_a_legend_has_bars_before_lines_and_is_left_out_where_nothing_is_marked() -> None:
    figure, axes = style.new_figure()
    style.legend(axes, "sharding_of")
    assert not figure.legends
    axes.plot([1], [1], label="line")
    axes.bar(1, 1, label="bar")
    style.legend(axes, "sharding_of")
    [key] = figure.legends
    assert [text.get_text() for text in key.get_texts()] == ["bar", "line"]
    assert key.get_title().get_text() == "sharding of"
    for longest, columns in ((10, 4), (25, 4), (26, 3), (50, 2), (51, 1), (150, 1)):
        figure, _ = style.new_figure()
        style.key(figure, [Line2D([], [])] * 5, ["a", "b", "x" * longest, "c", "d"])
        assert figure.legends[0]._ncols == columns  # type: ignore[attr-defined]


def test_a_chart_is_for_cells_that_have_what_it_needs() -> None:
    two = of_choices("O1", "O2").assign(peak_gib=[1.0, NAN])
    one, mixed = of_choices("O1"), two.assign(device=["V100", "A100"])

    def fits(cells: DataFrame, **needs: object) -> bool:
        return Chart("a", "A", lambda _: style.new_figure()[0], **needs).is_for(cells)  # type: ignore[arg-type]

    assert fits(one)
    assert not fits(one[:0])
    assert (fits(two, least=2), fits(two, least=3)) == (True, False)
    needs = ("peak_gib", "images_per_second")
    assert (fits(two, needs=needs), fits(two, needs=needs, least=2)) == (True, False)
    assert not fits(two, needs=("no_such_column",))
    assert (fits(two, varies=("precision",)), fits(one, varies=("precision",))) == (True, False)
    assert not fits(two, varies=("precision", "world_size"))
    assert [fits(two, num_varied=n) for n in (0, 1, 2)] == [True, True, False]
    assert [fits(cells, one_device=True) for cells in (two, mixed)] == [True, False]
    assert fits(mixed)
    failed = mixed.assign(status=[Status.measured, Status.failed])
    assert fits(failed, one_device=True), "what failed ran on no device"
    assert fits(two.drop(columns="device"), one_device=True)


def test_series_of_one_colour_differ_in_line_and_marker() -> None:
    found = of_choices("O1", "O2", "O1", "O1", "fp32", base="c4")
    names = Series(["a", "b", "c", "d", "base"], found.index)
    looks = style.looks(found, names)
    o1, o2 = (style.place("precision", name) for name in ("O1", "O2"))
    assert {name: look.colour for name, look in looks.items()} == {
        "a": style.PALETTE[o1], "b": style.PALETTE[o2], "c": style.PALETTE[o1], "d": style.PALETTE[o1],
        "base": style.BASELINE,
    }  # fmt: skip
    assert [looks[name].line for name in "abcd"] == [*style.LINES[:1] * 2, *style.LINES[1:3]]
    assert [looks[name].marker for name in "acd"] == [style.MARKERS[(o1 + n) % 8] for n in range(3)]
    assert list(style.looks(found)) == ["O1", "O2", "baseline"]
    alike = of_choices("O1", "O1").assign(model_depth=[1, 2])
    by_place = style.looks(alike, Series(["x", "y"], alike.index))
    assert [look.colour for look in by_place.values()] == list(style.PALETTE[:2])
    single = style.looks(alike, Series(["x", "x"], alike.index))
    assert [look.colour for look in single.values()] == [style.PALETTE[o1]]


def test_the_choices_that_vary_name_a_series_and_sizes_do_not() -> None:
    runs = table(run("a"), run("b", precision="O1", batch="blog_560", world_size=4))
    found = cells(runs, {"a": None, "b": None})
    assert style.choice_columns(found) == ["precision"]
    assert style.first_group(found) == "precision"
    assert style.labels(found).tolist() == ["fp32", "O1"]
    assert style.first_group(of_choices("O1")) == "precision"
    models = table(
        run("a"), run("b", model="vit_small"), run("c", sharding="fsdp", model="vit_small")
    )
    assert style.first_group(cells(models, {})) == "sharding"
    assert style.first_group(cells(models[:2], {})) == "model"
    seeds = table(run("a"), run("b", seed=1), run("c", seed=1, images_per_step=128))
    named = style.settings(cells(seeds, {}))
    assert (named[0] == named[1], named[1] == named[2]) == (True, False)


def test_the_fastest_series_and_the_baseline_are_drawn() -> None:
    found = of_choices("O1", "O2", "O3", "fp32", base="c3")
    for most, kept, told in (
        (1, "O1 baseline", 1),
        (3, "O1 O2 O3 baseline", 0),
        (4, "O1 O2 O3 baseline", 0),
    ):
        some, cut = style.fastest(found, most)
        assert style.labels(some).tolist() == kept.split()
        assert bool(cut) == bool(told)
    some, cut = style.fastest(found, 2)
    assert cut == "2 fastest of 4 and the baseline"
    alone = of_choices("O1", "O2", "O3")
    assert style.fastest(alone, 2)[1] == "2 fastest of 3"
    every, cut = style.fastest(alone, 3)
    assert (len(every), cut) == (3, "")
    names = Series(["x", "y", "y"], alone.index)
    assert style.fastest(alone, 1, names)[0]["cell_id"].tolist() == ["c0"]


def test_a_dollar_in_a_name_begins_no_formula() -> None:
    figure, axes = style.new_figure()
    axes.plot([1, 2], label="$\\frac{$")
    axes.set_yticks([1, 2], ["$\\frac{$", "$b$"])
    style.title(axes, "$\\frac{$")
    style.legend(axes)
    assert "<svg" in style.to_svg(style.freeze_layout(figure))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$\\frac{$", "$b$"]


def test_a_caption_has_what_the_measured_cells_share() -> None:
    runs = [
        run("a", minute=1, world_size=2, validity={"oversubscribed": True}),
        run(
            "b",
            minute=2,
            precision="O1",
            world_size=8,
            environment={"started_at": "2026-11-01T00:00:00Z"},
        ),
        run("dead", status=Status.out_of_memory, precision="O2", world_size=16),
    ]
    found = cells(table(*runs), {}).sort_values("cell_id")
    assert style.ranks(found[:2]) == "2 to 8 ranks"
    assert style.ranks(found[:1]) == "2 ranks"
    assert style.ranks(found[:1].assign(world_size=1)) == "1 rank"
    assert style.ranks(found[:0]) == style.ranks(DataFrame()) == ""
    assert style.dates(found[:2]) == "2026-10-20 to 2026-11-01"
    assert style.dates(found[:1]) == "2026-10-20"
    assert style.dates(found.drop(columns="started_at")) == ""
    assert [text.rpartition(" (")[2] for text in style.flags(found[:2])] == ["1 cell)"]
    assert [text.rpartition(" (")[2] for text in style.flags(found[:1])] == ["all cells)"]
    assert style.flags(found[1:2]) == []
    parts = style.caption(found).split(" · ")
    assert {"AMD EPYC 7B13", "vit_nano", "2 to 8 ranks", "2026-10-20 to 2026-11-01"} < {*parts}
    assert "3 cells: 2 measured, 1 out of memory" in parts
    assert sum(part.endswith((" rank", " ranks")) for part in parts) == 1
    assert "2 cells, all measured" in style.caption(found[:2]).split(" · ")
    assert "" not in parts
