"""Axes, units and series of every chart, on sweeps with known answers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest

from tests.builders import from_runs, run, table
from tests.sample_sweep import baselines_of, records_of, sweep
from vitsweep.charts import effects, scaling, step, style
from vitsweep.report.html import drawn
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.cells import cells
from vitsweep.tables.effects import waterfall as waterfall_table
from vitsweep.tables.scaling import PURPOSES
from vitsweep.tables.scaling import communication as communication_of
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables


def names(axes, which="y"):
    return [tick.get_text() for tick in getattr(axes, f"get_{which}ticklabels")()]


def legend(axes):
    found = axes.get_legend() or axes.figure.legends[0]
    return [text.get_text() for text in found.get_texts()]


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.fixture
def steps():
    return waterfall_table(sweep("speedups").runs, sweep("speedups").baselines)


def test_the_waterfall_has_a_side_for_each_kind_and_hangs_each_bar_on_the_one_before(steps):
    alone, cumulative = effects.WATERFALL.draw(steps).axes
    assert names(alone)[:2] == ["O3", "O1"]
    assert names(cumulative)[:3] == ["baseline", "+ O1", "+ fsdp"]
    assert alone.get_xlabel() == "Speedup over the baseline (x)"
    before, after = cumulative.patches[1:3]
    assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    assert "1.25x [1.23, 1.27], gain 0.96x [0.94, 0.99]" in texts(cumulative)


def test_the_waterfall_says_what_became_of_a_technique_that_was_not_measured(steps):
    alone = effects.WATERFALL.draw(steps).axes[0]
    assert {"wrong", "killed"} <= set(texts(alone))


def test_techniques_of_different_groups_have_different_colours_in_the_waterfall(steps):
    cumulative = effects.WATERFALL.draw(steps).axes[1]
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in cumulative.patches]
    assert len(set(colours)) == len(colours)
    assert colours[1] == style.colour("precision", "O1")


def test_techniques_whose_usual_colour_is_the_same_differ_in_the_waterfall():
    """In the sample of a GPU two pairs of techniques have one usual colour."""
    folder = Path(__file__).parents[2] / "analysis/sample_h200"
    table = effects.steps_of(SweepTables.of(folder))
    bars = [bar for axes in effects.draw_steps(table).axes for bar in axes.patches]
    known = table[table["speedup"].notna()].sort_values("speedup", ascending=False)
    alone = known[known["kind"] == "alone"]
    added = known[known["kind"] == "cumulative"].sort_values("position")
    drawn: dict[str, set[str]] = {}
    for name, bar in zip([*alone["added"], *added["added"]], bars, strict=True):
        colour = bar.get_edgecolor() if bar.get_hatch() else bar.get_facecolor()
        drawn.setdefault(name, set()).add(matplotlib.colors.to_hex(colour))
    assert all(len(colours) == 1 for colours in drawn.values())
    assert len(set.union(*drawn.values())) == len(drawn) == 9


@pytest.fixture
def curves():
    return scaling.SCALING.table(sweep("scaling"))


def test_scaling_has_throughput_and_efficiency_for_both_kinds(curves):
    figure = scaling.draw(curves)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "Throughput, all ranks (img/s)", "Scaling efficiency (1)"
    ] * 2  # fmt: skip
    assert [axes.get_xlabel() for axes in figure.axes] == ["Ranks"] * 4
    assert [axes.get_title("left") for axes in figure.axes[::2]] == list(scaling.TITLES.values())
    assert legend(figure.axes[1]) == ["baseline", "O1 + fsdp + adamw_foreach + pooled", "ideal"]
    assert names(figure.axes[0], "x") == ["1", "2", "4", "8"]


def test_oversubscribed_points_are_hollow(curves):
    left = scaling.draw(curves).axes[0]
    hollow = [line for line in left.lines if line.get_markerfacecolor() == style.PAPER]
    assert {x for line in hollow for x in line.get_xdata()} == {4, 8}
    joined = [line for line in left.lines if line.get_linewidth() == 1.8]
    assert {tuple(line.get_xdata()) for line in joined} == {(1, 2)}
    for chart in (scaling.SCALING, scaling.GPU_SCALING):
        said = chart.reading(curves)
        assert said.count("at 4 ranks") == 1
    alone = curves[curves["world_size"] <= 2]
    assert "no efficiency" not in scaling.SCALING.reading(alone)


def test_no_ideal_line_is_drawn_through_one_point(curves):
    def dotted(table):
        return [
            line for line in scaling.draw(table).axes[0].lines if line.get_color() == style.QUIET
        ]

    assert len(dotted(curves)) == 2
    points = set(zip(curves["world_size"], curves["images_per_second"], strict=True))
    for line in dotted(curves):
        rates = dict(zip(*line.get_data(), strict=True))
        per_rank = {rate / ranks for ranks, rate in rates.items()}
        assert max(per_rank) == pytest.approx(min(per_rank))
        assert points & set(rates.items()), "it goes through the first point of a curve"
    assert not dotted(curves[curves["world_size"] != 2])


def test_bars_by_ranks_compare_several_curves():
    tables, alone = sweep("scaling"), SimpleNamespace()
    assert scaling.GPU_SCALING.table(tables).equals(tables.scaling)
    alone.scaling = tables.scaling[tables.scaling["claim"] == Claim.baseline]
    assert len(alone.scaling)
    assert scaling.GPU_SCALING.table(alone).empty


def test_speedups_by_ranks_stand_behind_the_bars(curves):
    axes = scaling.GPU_SCALING.draw(curves).axes[0]
    assert axes.get_xlabel() == "Throughput per rank (img/s)"
    assert names(axes)[:2] == ["1 rank · baseline", "1 rank · O1 + fsdp + adamw_foreach + pooled"]
    ratios = [float(t.split(", ")[1].partition("x")[0]) for t in texts(axes) if "x [" in t]
    assert ratios == pytest.approx([1.36] * 4, abs=0.03)


def test_the_baseline_is_grey_in_lines_and_bars(curves):
    lines = scaling.draw(curves).axes[0].lines
    assert any(line.get_color() == style.BASELINE for line in lines)
    bars = scaling.GPU_SCALING.draw(curves).axes[0].patches
    hues = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in bars]
    assert style.BASELINE in hues
    assert set(hues) != {style.BASELINE}


def test_a_class_token_more_or_less_is_no_length():
    cells = sweep("speedups").cells
    lengths = [49, 50, 65] + [50] * (len(cells) - 3)
    runs, other = sweep("speedups").runs, cells.assign(num_tokens=lengths)
    assert scaling.SEQUENCE_LENGTH.table(from_runs(runs, {}, other)).empty


def test_the_optimizer_step_says_ratio_and_share():
    table = step.OPTIMIZER_STEP.table(sweep("speedups"))
    axes = step.OPTIMIZER_STEP.draw(table).axes[0]
    assert names(axes) == ["adamw_foreach", "adamw_loop"]
    assert axes.get_xlabel() == "Optimizer step (ms)"
    assert any("4.3" in text and "2.5 % of the step" in text for text in texts(axes))


def optimizers(**times):
    """Cells with these milliseconds of their optimizer, of a step of 100 ms."""
    return table(
        *[
            run(name, "b0", 640.0, optimizer=name, metrics={"optimizer_ms": ms})
            for name, ms in times.items()
        ]
    )


def test_an_optimizer_is_compared_with_the_loop_of_its_family():
    runs = optimizers(adamw_loop=20.0, adamw_fused=5.0, lamb_foreach=8.0, adamw_foreach=None)
    found = step.optimizer_steps(cells(runs, {})).set_index("cell_id")
    assert found["family"].to_dict() == {
        "adamw_fused": "adamw",
        "adamw_loop": "adamw",
        "lamb_foreach": "lamb",
    }
    assert found["implementation"].tolist() == ["fused", "loop", "foreach"]
    assert found["step_ratio"].tolist()[:2] == [4.0, 1.0]
    assert found["share_of_step"].tolist() == pytest.approx([0.05, 0.2, 0.08])
    assert math.isnan(found.loc["lamb_foreach", "step_ratio"])
    told = dict(
        zip(
            ["fused", "loop", "lamb"],
            texts(step.draw_optimizers(found.reset_index().assign(match="")).axes[0]),
            strict=True,
        )
    )
    assert "4.00x" in told["fused"]
    assert "x" not in told["loop"] + told["lamb"]

    def drawn_of(**times):
        runs = optimizers(**times)
        tables = from_runs(
            runs,
            dict.fromkeys(times, "adamw_loop"),
            cells(runs, dict.fromkeys(times, "adamw_loop")),
        )
        return len(step.optimizers_alone(tables))

    assert drawn_of(adamw_loop=20.0, adamw_fused=5.0) == 2
    assert drawn_of(adamw_loop=20.0, adamw_fused=None) == 0
    assert drawn_of(adamw_loop=20.0, lamb_loop=5.0) == 0


def test_the_bytes_that_are_sent_are_stacked_and_named_by_what_differs():
    sizes = {"a": (1, 2.0, 1.0), "b": (2, 4.0, 0.0), "c": (4, 0.0, 0.0)}
    runs = [
        run(name, world_size=ranks, metrics={
            "gradient_bytes_per_step": gradient * 2**20, "parameter_bytes_per_step": parameter * 2**20,
        })
        for name, (ranks, gradient, parameter) in sizes.items()
    ]  # fmt: skip
    found = cells(table(*runs), {})
    sent = step.sent(from_runs(table(*runs), {}, found))
    assert sent["cell_id"].tolist() == ["b", "a"]
    axes = step.draw_sent(sent).axes[0]
    assert [name.rpartition(" · ")[2] for name in names(axes)] == ["2 ranks", "1 rank"]
    assert sorted(p.get_width() for p in axes.patches[:4]) == [0, 1, 2, 4]
    assert [text.partition(" ")[0] for text in texts(axes)] == ["4.00", "3.00"]
    assert not [line for line in axes.lines if len(line.get_xdata())], "no formula"


def test_the_memory_of_a_cell_without_a_figure_is_named_by_its_end():
    runs = [
        run("a", metrics={"peak_rss_gib": 2.0}),
        run("b", sharding="fsdp", metrics={"peak_rss_gib": 3.0}),
        run("c", precision="O1", metrics={"peak_rss_gib": 4.0}),
        run("d", precision="O2", status=Status.out_of_memory),
        run("e", precision="O3", status=Status.killed),
    ]
    axes = step.draw_memory(cells(table(*runs), {})).axes[0]
    assert texts(axes) == ["4.00", "2.00", "out of memory", "3.00"]
    assert [bool(bar.get_hatch()) for bar in axes.patches[:4]] == [False, False, True, False]
    assert legend(axes) == ["ddp", "fsdp"]


def curve(kind, name, *points, **facts):
    """Points of one curve: ranks, img/s, efficiency."""
    return [
        {
            "scaling": kind, "curve": f"{kind} {name}", "precision": name, "world_size": ranks,
            "images_per_second": rate, "images_per_second_per_rank": rate / ranks, "efficiency": part,
            "efficiency_low": part - 0.1, "efficiency_high": part + 0.3, "efficiency_note": "",
            "images_per_step": 64, "images_per_rank": 64 / ranks, "cell_id": f"{name}{ranks}",
            "status": "measured", "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "claim": "faster",
        }
        | facts
        for ranks, rate, part in points
    ]  # fmt: skip


def test_points_ideals_and_whiskers_of_scaling_stand_at_their_figures():
    nan = math.nan
    both = curve("strong", "O1", (1, 100.0, 1.0), (2, 150.0, 0.75)) + curve(
        "strong", "O2", (2, 300.0, 1.0), (4, 660.0, 1.1)
    )
    weak = curve("weak", "O1", (1, 50.0, 1.0), (2, 90.0, nan))
    figure = scaling.draw(pd.DataFrame(both + weak))
    strong, efficiency, below, _ = figure.axes
    joined = [line for line in strong.lines if line.get_linewidth() == 1.8]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in joined] == [
        ([1, 2], [100, 150]), ([2, 4], [300, 660]),
    ]  # fmt: skip
    ideal = [list(line.get_ydata()) for line in strong.lines if line.get_color() == style.QUIET]
    assert ideal == [[100, 200, 400], [150, 300, 600]]
    assert names(strong, "x") == ["1", "2", "4"]
    assert efficiency.get_ylim() == pytest.approx((0, 1.155))
    assert figure.axes[3].get_ylim() == pytest.approx((0, 1.1))
    segments = [s[:, 1].tolist() for c in efficiency.collections for s in c.get_segments()]
    assert [pytest.approx(s) for s in segments] == [
        [0.9, 1.3],
        [0.65, 1.05],
        [0.9, 1.3],
        [1.0, 1.4],
    ]
    [across] = [line for line in efficiency.lines if line.get_color() == style.QUIET]
    assert set(across.get_ydata()) == {1.0}
    assert not [line for line in below.lines if line.get_color() == style.QUIET], "of one point"
    tops = [axes.get_subplotspec().rowspan.start for axes in figure.axes]
    assert tops == [0, 0, 1, 1]


def test_curves_of_one_series_are_named_by_their_batch():
    for kind, column, per in (
        ("strong", "images_per_step", "step"),
        ("weak", "images_per_rank", "rank"),
    ):
        some = curve(kind, "O1", (1, 100.0, 1.0), (2, 150.0, 0.75), **{column: 32})
        more = [row | {"curve": "other", column: 128} for row in some]
        other = curve(kind, "O2", (1, 100.0, 1.0), (2, 150.0, 0.75), **{column: 32})
        assert legend(scaling.draw(pd.DataFrame(some + other)).axes[0]) == ["O1", "O2", "ideal"]
        told = legend(scaling.draw(pd.DataFrame(some + more)).axes[0])
        assert told[:2] == [f"O1, 32 img/{per}" if label else "" for label in told[:1]] + told[1:2]
        assert f"128 img/{per}" in told[1]


def test_bars_by_ranks_are_of_weak_scaling_where_it_was_measured():
    strong = curve("strong", "O1", (1, 100.0, 1.0), (2, 150.0, math.nan)) + curve(
        "strong", "fp32", (1, 80.0, math.nan), claim="baseline"
    )
    axes = scaling.draw_speedups(pd.DataFrame(strong)).axes[0]
    assert names(axes) == ["1 rank · O1", "1 rank · fp32", "2 ranks · O1"]
    assert [bool(bar.get_hatch()) for bar in axes.patches[:3]] == [False, False, True]
    assert ["x [" in text for text in texts(axes)] == [True, False, True]
    weak = curve("weak", "O1", (1, 50.0, 1.0)) + curve(
        "weak", "fp32", (1, 40.0, 1.0), speedup=math.nan
    )
    axes = scaling.draw_speedups(pd.DataFrame(strong + weak)).axes[0]
    assert [bar.get_width() for bar in axes.patches[:2]] == [50, 40]
    assert ["x [" in text for text in texts(axes)] == [True, False]


def test_memory_is_grouped_by_sharding_and_says_out_of_memory():
    axes = step.MEMORY.draw(sweep("sequences").cells).axes[0]
    assert axes.get_xlabel() == "Peak memory, worst rank (GiB)"
    assert sum(text.endswith("out of memory") for text in texts(axes)) == 6
    assert not axes.figure.legends  # a single choice


def test_sequence_length_marks_where_memory_ended():
    axes = scaling.SEQUENCE_LENGTH.draw(scaling.SEQUENCE_LENGTH.table(sweep("sequences"))).axes[0]
    assert axes.get_xlabel() == "Tokens of one image"
    assert axes.get_ylabel() == "Token throughput, all ranks (tokens/s)"
    methods = {"baseline", "ring", "ulysses", "dsp", "lasp"}
    assert set(legend(axes)) == methods | {"out of memory"}
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert {x for line in crosses for x in line.get_xdata()} == {2048, 4096, 8192, 16384}


def test_lengths_are_joined_only_where_ranks_cores_and_images_are_the_same():
    cells = scaling.SEQUENCE_LENGTH.table(sweep("sequences")).query("sequence_parallel == 'dsp'")
    images = cells["images_per_step"].mask(cells["num_tokens"] > 4096, 4)
    threads = {"resources.threads_per_rank": [2.0] + [1.0] * (len(cells) - 1)}
    changed = cells.assign(images_per_step=images, **threads)
    lines = [
        line
        for line in scaling.SEQUENCE_LENGTH.draw(changed).axes[0].lines
        if len(line.get_xdata())
    ]
    assert sorted(list(line.get_xdata()) for line in lines) == [[1024], [2048, 4096], [8192, 16384]]


def test_communication_names_the_degrees_where_they_are_all_that_differs():
    runs = table(
        *[
            run(f"r{d}", metrics={"activation_bytes_per_step": 100.0 * d}, **{"mesh.ring": d})
            for d in (1, 2, 4)
        ]
    )
    drawn = step.COMMUNICATION.draw(communication_of(cells(runs, {}))).axes[0]
    assert [name.rpartition(" ")[2] for name in names(drawn)] == ["ring=4", "ring=2", "ring=1"]


def test_communication_stacks_purposes_and_marks_the_formula():
    table = communication_of(sweep("sequences").cells)
    formula = {f"predicted_{p}": table[p] for p in PURPOSES if p in table}
    axes = step.COMMUNICATION.draw(table.assign(**formula)).axes[0]
    assert axes.get_xlabel().endswith("(MiB)")
    assert set(legend(axes)) == {"parameter", "gradient", "activation", "formula"}
    circles = next(line for line in axes.lines if line.get_marker() == "o")
    assert circles.get_xdata()[0] == pytest.approx(table["bytes_per_step"].max() / 2**20)


def test_charts_of_missing_and_infinite_values_still_draw():
    cells = sweep("speedups").cells
    broken = cells.assign(
        speedup_low=np.nan, speedup_high=np.nan, peak_rss_gib=np.nan, images_per_second=math.inf
    )
    step.MEMORY.draw(broken)


@pytest.mark.parametrize("kind", ["deuteranopia", "protanopia", "tritanopia"])
def test_the_palette_is_distinguished_with_any_colour_vision(kind):
    # Machado et al. (2009), severity 1.0, on linear RGB
    matrices = {
        "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    }
    colours = np.array([matplotlib.colors.to_rgb(c) for c in style.PALETTE])
    seen = np.clip(colours**2.2 @ np.array(matrices[kind]).T, 0, 1) ** (1 / 2.2)
    gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[i + 1 :]]
    assert min(gaps) > 0.1


@pytest.mark.full
@pytest.mark.slow
def test_scaling_is_drawn_next_to_cells_that_were_refused_or_died(tmp_path):
    """Rows without fields of the others' kind: no loss scale, no depth, no spec at all."""
    store = Store(tmp_path / "meta_gpu_scaling").create()
    for record in records_of("scaling"):
        is_plain = record.spec["precision"] == "fp32"
        fields = {"half_dtype": None if is_plain else "bfloat16", "precision.loss_scale": None}
        fields |= {} if is_plain else {"precision.half_dtype": "bfloat16", "model.sizes": [3, 4]}
        spec = record.spec | fields
        store.save_run(replace(record, sweep=store.name, spec=spec))
    for status in (Status.killed, Status.failed, Status.timed_out, Status.out_of_memory):
        spec = {"world_size": 4, "num_tokens": None, "half_dtype": None, "model": "timm"}
        store.save_run(run(f"dead-{status}", status=status, sweep=store.name, **spec))
    for name, known in (("bad", {"precision": "fp8"}), ("nothing", {})):
        refused = {"status": "invalid", "reason": "`precision=fp8` needs a GPU.", **known}
        store.cell(name).mkdir()
        (store.cell(name) / "record.json").write_text(json.dumps(refused))
    baselines = baselines_of(store.name, records_of("scaling"))
    store.append_command({"baselines": baselines | {"bad": None, "nothing": None}, "command": "x"})
    for read in (SweepTables.read(store.root), SweepTables.of(store)):
        drawn_too = {chart.name for chart, _, _ in drawn(read)}  # a warning is an error
        assert {"scaling", "gpu_scaling"} <= drawn_too
        assert "2 invalid" in style.caption(read.settings)
