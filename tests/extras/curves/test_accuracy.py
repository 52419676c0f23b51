"""Accuracy against speed and over training: what is drawn of curves with known answers."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame

from tests.builders import from_runs, run
from tests.tables import test_accuracy as of_replicates
from vitsweep.charts import style
from vitsweep.extras.curves.charts import accuracy
from vitsweep.report.html import ChartWarning, write_report
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.accuracy import MARGIN
from vitsweep.tables.sweep_tables import SweepTables

TOPS = {"fp32": (0.40, 0.60, 0.70), "bf16": (0.40, 0.58, 0.69)}
SPREAD = (0.00, 0.03, -0.03)
"""What a seed shifts in every setting, so that differences between pairs vary far less."""


def trained(
    name: str, seed: int, tops: Sequence[float], epoch_seconds: float = 10.0, **spec: Any
) -> RunRecord:
    """A training that is evaluated after each of its epochs."""
    curve = [
        {"epoch": n, "seconds": n * epoch_seconds, "accuracy_top1": top, "accuracy_top5": 1.0}
        for n, top in enumerate(tops, start=1)
    ]
    record = run(
        f"{name}-{seed}", f"s{seed}", 1000 / epoch_seconds, minute=seed, seed=seed, task="train",
        metrics={"accuracy_top1": tops[-1], "train_seconds": len(tops) * epoch_seconds},
        **{"precision": name, **spec},
    )  # fmt: skip
    return replace(record, samples={"training": curve})


def diverged(name: str, seed: int) -> RunRecord:
    place = {"minute": seed, "precision": name, "seed": seed, "task": "train"}
    return run(f"{name}-{seed}", f"s{seed}", status=Status.diverged, **place)


def two_settings(**spec: Any) -> list[RunRecord]:
    """Two settings of three seeds; bf16 loses 1 point and 0.1 more or less, and is twice as fast."""
    return [
        trained(
            name,
            seed,
            [top + SPREAD[seed] + (0.001 * (seed - 1) if name == "bf16" else 0.0) for top in tops],
            epoch_seconds=10.0 if name == "fp32" else 5.0,
            **spec,
        )
        for name, tops in TOPS.items()
        for seed in range(3)
    ]


def written(folder: Path, records: list[RunRecord], base: str = "fp32", key: str = "seed") -> Store:
    store = Store(folder).create()
    for record in records:
        store.save_run(record)
    baselines = {record.cell_id: f"{base}-{record.cell_id[-1]}" for record in records}
    store.append_command({"baselines": baselines, "cells": list(baselines), "replicate": key})
    return store


def repeated(store: Store) -> SweepTables:
    """The sweep as the report draws it: one row per setting."""
    found = SweepTables.of(store)
    assert len(found.replicates)
    return found


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_report_has_both_charts(tmp_path: Path) -> None:
    store = written(tmp_path / "two", two_settings())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChartWarning)
        page = write_report(store)
    text = page.read_text(encoding="utf-8")
    titles = {
        "accuracy": "Accuracy against speed",
        "training_curves": "Accuracy over training",
    }
    for name, title in titles.items():
        assert title in text
        assert (page.parent / f"{name}.png").stat().st_size > 10_000


def whiskers(figure: Figure) -> dict[str, list[float]]:
    """Colour -> ends of the vertical whiskers of the first panel."""
    return {
        to_hex(bars.get_color()[0]): sorted(bars.get_paths()[0].vertices[:, 1].tolist())
        for bars in figure.axes[0].collections
        if len(bars.get_paths()) and len(set(bars.get_paths()[0].vertices[:, 0])) == 1
    }


def test_whiskers_against_speed_are_the_paired_interval_of_the_difference(tmp_path: Path) -> None:
    settings = repeated(written(tmp_path / "two", two_settings())).replicates
    row = settings.set_index("precision").loc["bf16"]
    found = whiskers(accuracy.draw(settings))
    assert list(found) == [style.colour("precision", "bf16")], "the baseline has none"
    [ends] = found.values()
    wanted = [0.70 + row["accuracy_difference_low"], 0.70 + row["accuracy_difference_high"]]
    assert ends == pytest.approx([100 * end for end in wanted])
    assert ends[1] - ends[0] < 1 < 100 * (row["accuracy_top1_high"] - row["accuracy_top1_low"])


def points(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if not str(line.get_label()).startswith("_")]


def test_points_bands_and_whiskers_stand_at_their_figures_in_both_panels(tmp_path: Path) -> None:
    found = repeated(written(tmp_path / "two", two_settings())).replicates
    found = found.sort_values("precision", ascending=False)  # fp32, bf16
    ends = {"speedup_low": [1.0, 1.8], "speedup_high": [1.0, 2.3], "speedup": [1.0, 2.0]}
    times = {"seconds_to_target": [30.0, 15.0], "seconds_to_target_low": [25.0, 14.0]}
    times |= {"seconds_to_target_high": [40.0, None]}
    for claim, filled in (
        ("worse", False),
        ("no worse", True),
        ("better", True),
        ("not shown", False),
    ):
        table = found.assign(**ends, **times, accuracy_claim=["baseline", claim])
        speed, time = accuracy.draw(table).axes
        faces = [to_hex(line.get_markerfacecolor()) for line in points(speed)]
        hues = [style.colour("precision", name) for name in ("fp32", "bf16")]
        assert faces == [style.BASELINE, hues[1] if filled else style.PAPER]
    for axes, at in ((speed, [1.0, 2.0]), (time, [30.0, 15.0])):
        assert [line.get_xdata()[0] for line in points(axes)] == at
        assert [line.get_ydata()[0] for line in points(axes)] == pytest.approx([70, 69])
        [band] = axes.patches
        assert band.get_bbox().intervaly.tolist() == pytest.approx([69.5, 70.0])
    assert [bool(axes.get_ylabel()) for axes in (speed, time)] == [True, False]
    assert [axes.get_xlabel() for axes in (speed, time)] == [
        style.axis_label(c) for c in accuracy.COLUMNS
    ]
    level = [
        [*sorted(path.vertices[:, 0].tolist()), path.vertices[0, 1]]
        for axes in (speed, time) for bars in axes.collections for path in bars.get_paths()
        if len({*path.vertices[:, 1]}) == 1
    ]  # fmt: skip
    assert level == [pytest.approx(ends) for ends in ((1, 1, 70), (1.8, 2.3, 69), (25, 40, 70))]
    assert legend(speed.get_figure())[:2] == ["baseline", "bf16"]
    without = found.assign(**ends, seconds_to_target=[30.0, None], accuracy_top1=[0.7, 0.6])
    assert [len(line.get_xdata()) for line in points(accuracy.draw(without).axes[1])] == [1, 0]
    assert len(accuracy.draw(found.assign(**ends, seconds_to_target=None)).axes) == 1


def test_too_few_pairs_have_no_whisker(tmp_path: Path) -> None:
    records = [record for record in two_settings() if not record.cell_id.endswith("2")]
    assert whiskers(accuracy.draw(repeated(written(tmp_path / "few", records)).replicates)) == {}


def test_band_and_markers_are_explained_in_the_image(tmp_path: Path) -> None:
    figure = style.freeze_layout(
        accuracy.draw(repeated(written(tmp_path / "two", two_settings())).replicates)
    )
    [key] = figure.legends
    texts = [text.get_text() for text in key.get_texts()]
    assert sum(f"{100 * MARGIN:g} points" in text for text in texts) == 2, "band and filled"
    assert {text.partition(":")[0] for text in texts} >= {"filled", "hollow"}
    box = key.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert figure.axes[0].xaxis.label.get_window_extent().y0 > box.y1


def test_a_setting_that_never_reached_the_target_and_diverged_leaves_room_for_the_panels(
    tmp_path: Path,
) -> None:
    records = [*two_settings(), *(diverged("O3", seed) for seed in range(3))]
    found = repeated(written(tmp_path / "lost", records)).replicates
    figure = style.freeze_layout(accuracy.draw(found))
    assert "O3: diverged" in legend(figure)
    assert figure.axes[0].get_position().width > 0.4


def test_the_chart_fills_what_is_no_worse_and_crosses_what_diverged() -> None:
    lost = of_replicates.diverged("O1", 3)
    for extra, filled, crosses in (((), {"baseline", "O1"}, 0), ((lost,), {"baseline"}, 2)):
        found = of_replicates.settings(*extra).reset_index(drop=True)
        figure = accuracy.CHART.draw(accuracy.CHART.table(from_runs(DataFrame(), {}, found)))
        speed, target = figure.axes
        assert speed.get_xlabel().startswith("Speedup")
        assert "time" in target.get_xlabel()
        named = {str(line.get_label()).removesuffix(": diverged"): line for line in speed.lines}
        points = {name: named[name] for name in ("baseline", "O1", "O2", "O3")}
        legend = {text.get_text() for key in figure.legends for text in key.get_texts()}
        assert legend >= {str(p.get_label()) for p in points.values()}, (
            "O3 never reached the target"
        )
        solid = {name for name, line in points.items() if line.get_mfc() == line.get_mec()}
        assert solid == filled
        crossed = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "x"]
        assert len(crossed) == crosses
