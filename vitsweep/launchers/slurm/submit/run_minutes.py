"""How long the runs of a sweep take: measured, predicted, or assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import RunRecord, Status


@dataclass(frozen=True)
class RunMinutes:
    """Expected minutes of a run of each cell.

    Attributes:
        minutes: cell id -> minutes.
        known: cells whose minutes were measured or predicted; those of the others are assumed.
    """

    minutes: dict[str, float]
    known: frozenset[str]


def run_minutes(
    plan: SweepPlan, runs: Sequence[RunRecord], predicted: Mapping[str, float], assumed: float
) -> RunMinutes:
    """Return the expected minutes of a run of every cell of the plan.

    A cell that ran takes the median of its measured runs. Another one takes its prediction, times
    what measured runs of this sweep took relative to theirs; without a prediction the median of
    all measured runs; without those `assumed`.

    Args:
        plan: the cells.
        runs: of the sweep, made so far.
        predicted: cell id -> predicted minutes of a run.
        assumed: `hydra.launcher.minutes_per_run`.
    """
    measured: dict[str, list[float]] = {}
    for run in runs:
        if run.status == Status.measured and "run_seconds" in run.environment:
            measured.setdefault(run.cell_id, []).append(run.environment["run_seconds"] / 60)
    medians = {cell_id: median(minutes) for cell_id, minutes in measured.items()}
    ratios = [minutes / predicted[c] for c, minutes in medians.items() if predicted.get(c)]
    ratio = median(ratios) if ratios else 1.0
    estimated = {cell_id: minutes * ratio for cell_id, minutes in predicted.items()}
    known = estimated | medians
    default = median(medians.values()) if medians else assumed
    return RunMinutes(
        {cell_id: known.get(cell_id, default) for cell_id in plan.entries},
        frozenset(plan.entries) & frozenset(known),
    )
