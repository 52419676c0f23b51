from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest

from tests.builders import run, table
from vitsweep.charts import effects, speedup, step, style
from vitsweep.charts.style import caption
from vitsweep.results.record import SCREENING, Status
from vitsweep.tables.cells import cells
from vitsweep.tables.render import tally_of
from vitsweep.tables.sweep_tables import SweepTables

BASELINES = {name: "base" for name in ("base", "fast", "same", "dead")}


def phase_ms(scale):
    return {"data_ms": scale, "forward_ms": 3 * scale, "backward_ms": 6 * scale}


@pytest.fixture
def four():
    runs = [
        *[run("base", f"b{i}", 100 + i, metrics=phase_ms(60.0)) for i in range(3)],
        *[
            run("fast", f"b{i}", 200 + 3 * i, precision="O2", metrics=phase_ms(30.0))
            for i in range(3)
        ],
        *[run("same", f"b{i}", 101 + (-1) ** i, precision="bf16") for i in range(3)],
        run("dead", "b0", status=Status.out_of_memory, reason="no room", sharding="fsdp"),
    ]
    return cells(table(*runs), BASELINES)


def labels(axes):
    return [tick.get_text() for tick in axes.get_yticklabels()]


def test_long_labels_are_shortened_to_others_that_still_differ():
    shared = "vit_nano · digits"
    names = [
        f"{c} · {shared} · {n} ranks · 64 images a step" for c in ("fsdp", "O1") for n in (1, 2)
    ]
    names += [f"{'O1 + ' * 9}fsdp · {shared} · 1 ranks · 64 images a step"]
    assert style.shorten(names, 30) == [
        "fsdp · 1 ranks", "fsdp · 2 ranks", "O1 · 1 ranks", "O1 · 2 ranks",
        "O1 + O1 + O1 + …fsdp · 1 ranks",
    ]  # fmt: skip
    assert style.shorten(names[:2], 60) == names[:2]


def test_speedup_bars_are_labelled_sorted_and_coloured_by_technique(four):
    axes = speedup.draw(four).axes[0]
    assert labels(axes) == ["O2", "bf16", "baseline"]
    assert "Speedup over the baseline (x)" in axes.get_xlabel()
    fast, same, base = axes.patches[:3]
    assert fast.get_width() == pytest.approx(four.set_index("cell_id").loc["fast", "speedup"])
    assert matplotlib.colors.to_hex(fast.get_facecolor()) == style.colour("precision", "O2")
    assert matplotlib.colors.to_hex(base.get_facecolor()) == style.BASELINE
    assert same.get_hatch()
    legend = [t.get_text() for t in axes.figure.legends[0].get_texts()]
    assert legend[:2] == ["O2", "bf16"]
    assert legend[2].startswith("hatched: ")
    assert axes.figure.legends[0].get_title().get_text() == "precision"


def test_every_bar_with_an_interval_has_whiskers(four):
    assert len(speedup.draw(four).axes[0].containers) >= 2


def test_no_value_of_the_speedup_chart_runs_into_the_legend(four):
    fast = four["cell_id"] == "fast"
    ends = {"speedup": 1.29, "speedup_low": 1.06, "speedup_high": 1.58}
    table = four.assign(claim=four["claim"].mask(fast, "no difference shown"))
    table.loc[fast, list(ends)] = list(ends.values())
    figure = style.freeze_layout(speedup.draw(table))
    [axes] = figure.axes
    legend = figure.legends[0].get_window_extent()
    assert legend.y1 < axes.get_window_extent().y0
    assert max(text.get_window_extent().x1 for text in axes.texts) <= figure.bbox.width


def test_one_wide_whisker_is_cut_with_an_arrow_and_its_value(four) -> None:
    wide = four.assign(speedup_high=four["speedup_high"].mask(four["cell_id"] == "same", 40.0))
    [axes] = style.freeze_layout(speedup.draw(wide)).axes
    assert axes.get_xlim()[1] < 5
    whiskers = [segment[:, 0].max() for c in axes.collections for segment in c.get_segments()]
    assert 1 < max(whiskers) <= axes.get_xlim()[1]
    assert [text.get_text() for text in axes.texts if "up to 40.0" in text.get_text()]
    assert [line for line in axes.lines if line.get_marker() == ">"]
    assert not [text for text in axes.texts if "()" in text.get_text()]


def test_phases_stack_to_the_sum_and_mark_the_timed_step(four):
    axes = step.PHASES.draw(four).axes[0]
    assert labels(axes) == ["O2", "baseline"]
    assert axes.get_xlabel() == "Step time (ms)"
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(600.0)
    assert "Timed step" in [t.get_text() for t in axes.figure.legends[0].get_texts()]


def test_a_table_without_phases_still_draws():
    step.PHASES.draw(cells(table(run("base")), {}))


def test_the_same_figure_gives_the_same_svg(four):
    first, second = (style.to_svg(speedup.draw(four)) for _ in range(2))
    assert first == second


def test_a_technique_keeps_its_colour_whatever_else_is_drawn():
    assert style.colour("precision", "O2") == style.colour("precision", "O2")
    assert style.colour("precision", "unheard_of") in style.PALETTE
    known = [style.colour("sequence_parallel", c) for c in "none ulysses ring dsp usp lasp".split()]
    assert len(set(known)) == len(known)


def test_drawing_leaves_no_global_state(four):
    before = dict(matplotlib.rcParams)
    style.to_svg(speedup.draw(four))
    assert dict(matplotlib.rcParams) == before


def test_the_caption_says_device_versions_date_and_what_is_left_out(four):
    facts = caption(four).split(" · ")
    assert facts[:5] == ["AMD EPYC 7B13", "vit_nano", "digits", "64 images", "2 ranks"]
    assert {"baseline: fp32", "torch 2.13.0", "2026-10-20"} < {*facts}
    assert facts[-1] == "4 cells: 3 measured, 1 out of memory"


def test_the_caption_counts_screened_cells_as_the_terminal_does() -> None:
    runs = table(
        *(run(c, f"b{i}") for c in ("base", "cell") for i in range(3)),
        run("short", precision="O2", purpose=SCREENING),
        run("base", purpose=SCREENING),
    )
    found = cells(runs, dict.fromkeys(("base", "cell", "short"), "base"))
    assert caption(found).split(" · ")[-1] == tally_of(found) == "3 cells: 2 measured, 1 screened"
    alike = found[found["cell_id"] != "base"]
    assert tally_of(alike) == tally_of(alike[::-1]) == "2 cells: 1 measured, 1 screened"


def test_the_caption_says_oversubscribed():
    one, other = (table(run("base", validity={"oversubscribed": x})) for x in (True, False))
    assert "scaling" in caption(cells(one, {}))
    assert "scaling" not in caption(cells(other, {}))


def test_names_and_values_of_a_real_sweep_are_whole_and_distinct() -> None:
    """Of `meta_speedups` on a GPU, whose names are as long as they get."""
    sweep = SweepTables.read(Path(__file__).parents[2] / "analysis" / "sample_h200")
    for chart in (
        speedup.SPEEDUP,
        step.MEMORY,
        step.PHASES,
        effects.WATERFALL,
        effects.EFFECTS,
    ):
        figure = style.freeze_layout(chart.draw(chart.table(sweep)))
        for axes in figure.axes:
            ends = [text.get_window_extent() for text in axes.texts]
            assert max(box.x1 for box in ends) <= figure.bbox.width, chart.name
            ticks = axes.get_yticklabels()
            assert min(tick.get_window_extent().x0 for tick in ticks) >= 0
            assert not [tick for tick in ticks if "…" in tick.get_text()]
            tops = [tick.get_window_extent() for tick in ticks]
            assert all(a.y0 >= b.y1 for a, b in pairwise(tops)), chart.name


def test_a_chart_over_a_baseline_names_it():
    runs = [
        run(f"{name}{px}", f"b{n}", speed + n, minute=n, precision=name, resolution_px=px)
        for n in range(3) for px in (8, 16) for name, speed in (("fp32", 100.0), ("O1", 150.0))
    ]  # fmt: skip
    found = cells(table(*runs), {r.cell_id: f"fp32{r.spec['resolution_px']}" for r in runs})
    for some, more in ((found, ""), (found[found["resolution_px"] == 8], " · 8 px")):
        figure = speedup.draw(some)
        style.name_baseline(figure, found, some)
        assert figure.get_suptitle() == f"baseline: fp32{more}"
