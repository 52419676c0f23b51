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
from tests.refusals import named
from vitsweep.charts import accuracy, style
from vitsweep.report.html import ChartWarning, write_report
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.accuracy import MARGIN, mean_curve
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


def curves_of(sweep: SweepTables) -> Figure:
    return style.freeze_layout(accuracy.CURVES.draw(accuracy.CURVES.table(sweep)))


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line(axes: Axes, label: str) -> Line2D:
    return next(found for found in axes.lines if found.get_label() == label)


def thin(axes: Axes) -> list[Line2D]:
    return [
        found for found in axes.lines if found.get_linewidth() == 0.8 and len(found.get_xdata())
    ]


def test_a_line_is_the_mean_over_seeds_against_seconds_and_against_epochs(tmp_path: Path) -> None:
    figure = curves_of(repeated(written(tmp_path / "two", two_settings())))
    seconds, epochs = figure.axes
    assert (seconds.get_xlabel(), epochs.get_xlabel()) == ("Training time (s)", "Epochs trained")
    assert seconds.get_ylabel() == "Top-1 accuracy on held-out images (%)"
    assert line(seconds, "baseline").get_ydata() == pytest.approx([40, 60, 70])
    assert line(seconds, "baseline").get_xdata() == pytest.approx([10, 20, 30])
    assert line(seconds, "bf16").get_xdata() == pytest.approx([5, 10, 15])
    assert line(epochs, "bf16").get_xdata() == pytest.approx([1, 2, 3])
    assert to_hex(line(epochs, "baseline").get_color()) == style.BASELINE
    assert len(thin(seconds)) == len(thin(epochs)) == 6
    assert legend(figure) == ["bf16", "baseline", "thin: one training"]


def test_the_target_is_a_dashed_line(tmp_path: Path) -> None:
    records = two_settings(**{"task.target_accuracy": 0.65})
    figure = curves_of(repeated(written(tmp_path / "two", records)))
    for axes in figure.axes:
        target = line(axes, "target: 65 %")
        assert list(target.get_ydata()) == [65, 65]
        assert target.get_linestyle() == "--"


def test_seeds_that_are_no_replicates_are_one_line_too(tmp_path: Path) -> None:
    figure = curves_of(SweepTables.of(written(tmp_path / "two", two_settings(), key="")))
    assert legend(figure) == ["bf16", "baseline", "thin: one training"]
    assert line(figure.axes[0], "baseline").get_ydata() == pytest.approx([40, 60, 70])


def test_settings_that_differ_in_a_number_only_are_lines_of_other_colours(tmp_path: Path) -> None:
    records = [
        trained(f"c{images}", 0, (0.3, 0.5), precision="fp32", images_per_step=images)
        for images in (32, 64, 128)
    ]
    figure = curves_of(SweepTables.of(written(tmp_path / "sizes", records, base="c32")))
    lines = [line(figure.axes[0], name) for name in ("baseline", "64 images", "128 images")]
    assert len({to_hex(found.get_color()) for found in lines}) == 3
    assert not thin(figure.axes[0]), "a single training is its mean"


def test_diverged_trainings_are_named_and_no_part_of_the_mean(tmp_path: Path) -> None:
    records = [r for r in two_settings() if r.cell_id != "bf16-0"]
    records += [diverged("bf16", 0), *(diverged("O3", seed) for seed in range(3))]
    figure = curves_of(repeated(written(tmp_path / "lost", records)))
    assert set(legend(figure)) >= {"bf16: 1 of 3 diverged", "O3: diverged", "baseline"}
    assert len(line(figure.axes[0], "O3: diverged").get_xdata()) == 0
    mean = line(figure.axes[0], "bf16: 1 of 3 diverged").get_ydata()
    assert mean == pytest.approx([40.05, 58.05, 69.05])


def test_one_seed_with_one_evaluation_is_a_point(tmp_path: Path) -> None:
    figure = curves_of(
        SweepTables.of(written(tmp_path / "one", [trained("fp32", 0, (0.4,))], key=""))
    )
    [only] = [found for found in figure.axes[0].lines if len(found.get_xdata())]
    assert (list(only.get_xdata()), list(only.get_ydata())) == ([10], [40])
    assert only.get_marker() not in ("", "None")


def test_of_twenty_settings_the_fastest_are_drawn_with_the_baseline(tmp_path: Path) -> None:
    records = [
        trained(f"c{n}", 0, (0.3, 0.5), 30.0 - n, precision="fp32", images_per_step=32 * (n + 1))
        for n in range(20)
    ]
    figure = curves_of(SweepTables.of(written(tmp_path / "many", records, base="c0", key="")))
    shown = figure.legends[0]
    assert {"8", "20"} <= named(shown.get_title().get_text())
    assert len(shown.get_texts()) == 9
    assert "baseline" in legend(figure)
    width = figure.bbox.width
    assert shown.get_window_extent().x1 <= width
    assert shown.get_window_extent().y0 >= 0


@pytest.mark.parametrize("samples", [{}, {"training": []}, {"training": [{"epoch": 1}]}])
def test_a_record_without_a_curve_leaves_the_chart_out(
    tmp_path: Path, samples: dict[str, Any]
) -> None:
    records = [replace(record, samples=samples) for record in two_settings()]
    assert accuracy.CURVES.table(repeated(written(tmp_path / "none", records))).empty


def test_a_record_without_a_curve_beside_others_is_left_out_alone(tmp_path: Path) -> None:
    first, *rest = two_settings()
    figure = curves_of(repeated(written(tmp_path / "some", [replace(first, samples={}), *rest])))
    assert line(figure.axes[0], "baseline").get_ydata() == pytest.approx([40, 60, 70])
    assert len(thin(figure.axes[0])) == 5


def test_without_training_there_is_no_chart(tmp_path: Path) -> None:
    store = written(tmp_path / "speed", [run("fp32-0"), run("bf16-0", precision="bf16")], key="")
    assert accuracy.CURVES.table(SweepTables.of(store)).empty
    assert accuracy.CURVES.table(from_runs(DataFrame(), {}, DataFrame())).empty


def test_several_sweeps_read_as_one_keep_their_curves(tmp_path: Path) -> None:
    for name in ("first", "second"):
        written(tmp_path / name, two_settings())
    found = accuracy.CURVES.table(SweepTables.read(tmp_path / "first", tmp_path / "second"))
    assert set(found["sweep"]) == {"first", "second"}
    assert found["curves"].map(len).eq(1).all()


def test_a_mean_is_taken_at_epochs_that_every_repetition_evaluated() -> None:
    every = DataFrame({"epoch": [1, 2], "seconds": [1.0, 2.0], "accuracy_top1": [0.1, 0.2]})
    last = DataFrame({"epoch": [2], "seconds": [4.0], "accuracy_top1": [0.4]})
    found = mean_curve([[every], [last, last]])
    assert found.to_dict("list") == {
        "epoch": [2], "seconds": [3.0], "accuracy_top1": [pytest.approx(0.3)],
    }  # fmt: skip
    assert mean_curve([[], []]).empty


def test_the_report_has_both_charts(tmp_path: Path) -> None:
    store = written(tmp_path / "two", two_settings())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChartWarning)
        page = write_report(store)
    text = page.read_text(encoding="utf-8")
    for name, title in (
        ("accuracy", "Accuracy against speed"), ("training_curves", "Accuracy over training"),
    ):  # fmt: skip
        assert title in text
        assert (page.parent / f"{name}.png").stat().st_size > 10_000


def whiskers(figure: Figure) -> dict[str, list[float]]:
    """Colour -> ends of the vertical whiskers of the first panel."""
    return {
        to_hex(bars.get_color()[0]): sorted(bars.get_paths()[0].vertices[:, 1].tolist())
        for bars in figure.axes[0].collections
        if len(bars.get_paths()) and len(set(bars.get_paths()[0].vertices[:, 0])) == 1
    }


def test_whiskers_beside_speed_are_the_paired_interval_of_the_difference(tmp_path: Path) -> None:
    settings = repeated(written(tmp_path / "two", two_settings())).replicates
    row = settings.set_index("precision").loc["bf16"]
    found = whiskers(accuracy.draw(settings))
    assert list(found) == [style.colour("precision", "bf16")], "the baseline has none"
    [ends] = found.values()
    wanted = [0.70 + row["accuracy_difference_low"], 0.70 + row["accuracy_difference_high"]]
    assert ends == pytest.approx([100 * end for end in wanted])
    assert ends[1] - ends[0] < 1 < 100 * (row["accuracy_top1_high"] - row["accuracy_top1_low"])


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
