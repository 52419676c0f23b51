"""The charts of a report; each is drawn where the sweep has data for it."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import (
    accuracy,
    communication,
    effects,
    epoch_hours,
    gpu_scaling,
    heat_map,
    limits,
    memory,
    optimizer_step,
    pareto,
    per_chip,
    phases,
    race,
    roofline,
    scaling,
    sequence_length,
    speedup,
    style,
    trace,
    training_curves,
    waterfall,
)
from vitsweep.charts.caption import caption
from vitsweep.report import chart_data
from vitsweep.tables.sweep_tables import SweepTables


class ChartWarning(UserWarning):
    """A chart could not be drawn; the report is written without it."""


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    Attributes:
        name: file name.
        title: heading.
        table: tables of a sweep -> the table that is drawn; empty where there is nothing to draw.
        draw: table -> figure.
        reading: how to read it, the first sentences of the caption; may depend on the table.
    """

    name: str
    title: str
    table: Callable[[SweepTables], DataFrame]
    draw: Callable[[DataFrame], Figure]
    reading: str | Callable[[DataFrame], str]


HATCHED = "Hatched: no difference is claimed."
HOLLOW = "Hollow or hatched: oversubscribed, so nothing is said about scaling."
CHARTS = (
    Chart("race", "Who was in the race when", chart_data.race, race.draw,
          "A line for each cell from its first run to the block after which it was dropped; dots: its runs; "
          "thick: it led. Green: the leader at the end; blue: the runner-up; red: failed or left out."),
    Chart("limits", "How far each goes", chart_data.limits, limits.draw,
          "Found by bisection; x: the smallest value that ran out of memory."),
    Chart("speedup", "Speedup over the baseline", chart_data.speedups, speedup.draw,
          f"Whiskers: 95 % interval of the ratio over paired blocks. {HATCHED}"),
    Chart("waterfall", "Techniques alone and on top of each other", chart_data.steps, waterfall.draw,
          f"In brackets the gain over the row above. {HATCHED}"),
    Chart("heat_map", "Speedup over two techniques", chart_data.grid,
          lambda cells: heat_map.draw(cells, *chart_data.two_groups(cells)),
          "The fastest cell of each combination."),
    Chart("effects", "Techniques on average over the other choices", chart_data.technique_effects,
          effects.draw, "Filled: the mean ratio to the baselines' choice over the other choices, with its "
          "95 % interval, from a mixed model within blocks; hollow: together with one other choice, "
          "shrunken as far as noise explains them."),
    Chart("phases", "Where the step's time goes", chart_data.phases, phases.draw,
          "Phases come from instrumented steps of their own; the diamond is the timed step."),
    Chart("optimizer_step", "The optimizer step", chart_data.optimizer_steps, optimizer_step.draw,
          "Cells that change nothing but the optimizer."),
    Chart("trace", "One traced step by implementation of the optimizer", chart_data.traced_steps,
          trace.draw, "Coloured: the optimizer step; grey: the end of the backward pass. The profiler "
          "slows small operations down: compare the shape, and take times from the table."),
    Chart("roofline", "Rate and arithmetic intensity of each phase",
          chart_data.phases_on_the_roofline, roofline.draw, roofline.reading),
    Chart("scaling", "Scaling", chart_data.curves,
          lambda table: scaling.draw(table, DataFrame(table.attrs["predicted"])),
          f"Dotted: ideal. Dashed: a fit with the 95 % interval of the measurement's noise; beyond the "
          f"last point it is a prediction, not a measurement. {HOLLOW}"),
    Chart("gpu_scaling", "Speedup by number of ranks", chart_data.several_techniques, gpu_scaling.draw,
          f"Over each bar the speedup over the baseline with as many ranks. {HOLLOW}"),
    Chart("sequence_length", "Throughput by length of the sequence", chart_data.lengths,
          sequence_length.draw, "Both axes are logarithmic."),
    Chart("communication", "Communication", chart_data.communication, communication.draw,
          "Counted at the collectives, mean of ranks."),
    Chart("memory", "Peak memory", chart_data.memory, memory.draw, "The worst rank's peak."),
    Chart("pareto", "Throughput, memory, accuracy", chart_data.front, pareto.draw,
          "Filled: no other cell is better in one and worse in none of what was measured; in brackets the "
          "probability of that, given the noise."),
    Chart("accuracy", "Accuracy beside speed", chart_data.accuracies, accuracy.draw,
          "Points: means over repetitions. Vertical whiskers: the mean difference from the baseline is at "
          "least and at most this, each with 95 %, over pairs of the same repetition; none with fewer than "
          "3 pairs. Horizontal: 95 % intervals. Filled: shown to lose less than 0.5 points of the "
          "baseline's accuracy (the grey band) after Holm's correction over the settings, or the baseline; "
          "cross: a repetition diverged. The line joins settings that no other beats in both axes."),
    Chart("training_curves", "Accuracy over training", chart_data.trainings, training_curves.draw,
          "Thick: mean over the trainings of a setting, at the epochs that all of them evaluated; a "
          "training that diverged is no part of it. Seconds are those of training, without evaluations; the "
          "time to the target is that of the first evaluation on or above the dashed line."),
    Chart("epoch_hours", "Hours per ImageNet-1k epoch", chart_data.epochs, epoch_hours.draw,
          "1,281,167 images at the measured throughput; reading images may be slower."),
    Chart("per_chip", "Throughput per chip", chart_data.chips, per_chip.draw,
          "Devices were never in one block, so there is no interval on this ratio."),
)  # fmt: skip


def drawn(tables: SweepTables) -> Iterator[tuple[Chart, Figure, str]]:
    """Yield chart, figure and caption for every chart that the sweep has the columns for."""
    if tables.runs.empty:
        return
    for chart in CHARTS:
        try:
            table = chart.table(tables)
            if len(table):
                figure = style.settled(chart.draw(table))
                reading = chart.reading if isinstance(chart.reading, str) else chart.reading(table)
                yield chart, figure, f"{reading} {caption(tables.settings)}."
        except Exception as error:  # a failing chart must not prevent the report of a long sweep
            text = f"the chart `{chart.name}` could not be drawn: {type(error).__name__}: {error}"
            warnings.warn(text, ChartWarning, stacklevel=2)
