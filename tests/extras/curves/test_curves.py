"""Accuracy over a training: what is drawn of curves with known answers."""

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
from tests.extras.curves.test_accuracy import (
    diverged,
    legend,
    repeated,
    trained,
    two_settings,
    written,
)
from tests.refusals import named
from vitsweep.charts import style
from vitsweep.extras.curves.charts.training_curves import CHART, mean_curve
from vitsweep.tables.sweep_tables import SweepTables


def curves_of(sweep: SweepTables) -> Figure:
    return style.freeze_layout(CHART.draw(CHART.table(sweep)))


def line(axes: Axes, label: str) -> Line2D:
    return next(found for found in axes.lines if found.get_label() == label)


def thin(axes: Axes) -> list[Line2D]:
    return [
        found for found in axes.lines if found.get_linewidth() == 0.8 and len(found.get_xdata())
    ]


@pytest.mark.smoke
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
    assert thin(seconds)[-1].get_ydata() == pytest.approx([37, 57, 67])
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
    assert CHART.table(repeated(written(tmp_path / "none", records))).empty


def test_a_record_without_a_curve_next_to_others_is_left_out_alone(tmp_path: Path) -> None:
    first, *rest = two_settings()
    figure = curves_of(repeated(written(tmp_path / "some", [replace(first, samples={}), *rest])))
    assert line(figure.axes[0], "baseline").get_ydata() == pytest.approx([40, 60, 70])
    assert len(thin(figure.axes[0])) == 5


def test_without_training_there_is_no_chart(tmp_path: Path) -> None:
    store = written(tmp_path / "speed", [run("fp32-0"), run("bf16-0", precision="bf16")], key="")
    assert CHART.table(SweepTables.of(store)).empty
    assert CHART.table(from_runs(DataFrame(), {}, DataFrame())).empty


def test_several_sweeps_read_as_one_keep_their_curves(tmp_path: Path) -> None:
    for name in ("first", "second"):
        written(tmp_path / name, two_settings())
    found = CHART.table(SweepTables.read(tmp_path / "first", tmp_path / "second"))
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
