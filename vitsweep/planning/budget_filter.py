"""Cells that their predictions leave out: too large, or beyond `sweep.max_gpu_hours`."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan

if TYPE_CHECKING:
    from vitsweep.predict.prediction import CellPrediction

Predictions = Mapping[str, "CellPrediction"]
"""Cell id -> prediction; cells without one stay in a plan."""


def bounded_hours(settings: SweepSettings) -> float | None:
    """Return the device-hours that a grid may take, or None; a race spends them as it goes."""
    return None if settings.search == "race" else settings.max_gpu_hours


def without_left_out(
    plan: SweepPlan, settings: SweepSettings, found: Predictions, missing: Mapping[str, int]
) -> SweepPlan:
    """Refuse the cells that `sweep.only` and `sweep.max_gpu_hours` leave out, with the figures.

    Args:
        plan: the cells.
        settings: of the sweep; with `try_anyway` nothing is left out.
        found: predictions.
        missing: cell id -> number of blocks it lacks.
    """
    if settings.try_anyway:
        return plan
    if settings.only == "fits":
        plan = mark_invalid(plan, {key: f.why_not for key, f in found.items() if f.why_not})
    hours = bounded_hours(settings)
    if hours is not None:
        plan = _within_hours(plan, found, missing, settings.cells_per_block, hours)
    return plan


def mark_invalid(plan: SweepPlan, reasons: Mapping[str, str]) -> SweepPlan:
    """Make cells invalid; those whose baseline is among them have none.

    Args:
        plan: the cells.
        reasons: cell id -> why it is left out.
    """
    entries = dict(plan.entries)
    for cell_id, entry in plan.entries.items():
        if cell_id in reasons:
            reason = reasons[cell_id]
            entries[cell_id] = replace(entry, reasons=(*entry.reasons, reason), baseline_id=None)
        elif entry.baseline_id in reasons:
            entries[cell_id] = replace(entry, baseline_id=None)
    return SweepPlan(entries)


def _within_hours(
    plan: SweepPlan,
    found: Predictions,
    missing: Mapping[str, int],
    cells_per_block: int,
    most: float,
) -> SweepPlan:
    """Refuse what the hours do not cover, in the order of the command.

    A cell costs the runs it lacks and those of its baseline in blocks that are not counted yet.
    """
    spent, reasons = 0.0, dict[str, str]()
    counted = _CountedRuns(missing, cells_per_block)
    for entry in plan.runnable:
        if entry.is_added_baseline:
            continue
        runs = counted.with_cell(entry)
        hours = sum(n * _run_hours(found.get(cell_id)) for cell_id, n in runs.items() if n)
        if hours == inf:
            reasons[entry.cell_id] = _unbounded(entry, most)
        elif spent + hours > most:
            reasons[entry.cell_id] = (
                f"needs {hours:.2g} of the {max(0.0, most - spent):.2g} predicted hours of devices that "
                f"`sweep.max_gpu_hours={most:g}` leaves it: raise it, or measure fewer cells."
            )
        else:
            spent += hours
            counted.add(entry)
    kept = mark_invalid(plan, reasons).entries
    wanted = {entry.baseline_id for entry in kept.values()}
    return SweepPlan({c: e for c, e in kept.items() if not e.is_added_baseline or c in wanted})


def _run_hours(prediction: "CellPrediction | None") -> float:
    """Return the device-hours of a run: 0 without a step time, infinite for unknown lengths."""
    if prediction is None or prediction.step_time is None:
        return 0.0
    hours = prediction.run_device_hours
    return inf if hours is None else hours[0]


def _unbounded(entry: PlannedCell, most: float) -> str:
    return (
        f"`data={entry.spec.data.name}` does not say how many images it trains on, so that "
        f"`sweep.max_gpu_hours={most:g}` cannot hold: leave that out, or use `task=measure`."
    )


@dataclass
class _CountedRuns:
    """Runs of the cells that are kept so far, as `blocks.runs_per_cell` counts them.

    Attributes:
        missing: cell id -> number of blocks it lacks.
        cells_per_block: cells of a block, its baseline not counted.
        variants: baseline -> round -> cells that are compared with it in that round.
        own_rounds: baseline -> rounds in which it runs even where no cell is compared with it.
    """

    missing: Mapping[str, int]
    cells_per_block: int
    variants: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    own_rounds: dict[str, int] = field(default_factory=dict)

    def with_cell(self, entry: PlannedCell) -> dict[str, int]:
        """Return cell id -> runs that keeping a cell adds: its own and those of its baseline."""
        lacking, baseline = self.missing.get(entry.cell_id, 0), entry.baseline_id
        if baseline is None or baseline == entry.cell_id:
            beside = self.variants[entry.cell_id]
            return {entry.cell_id: sum(not beside[round_] for round_ in range(lacking))}
        added = sum(self._begins_block(baseline, round_) for round_ in range(lacking))
        return {entry.cell_id: lacking, baseline: added}

    def add(self, entry: PlannedCell) -> None:
        """Keep a cell."""
        lacking, baseline = self.missing.get(entry.cell_id, 0), entry.baseline_id
        if baseline is None or baseline == entry.cell_id:
            self.own_rounds[entry.cell_id] = lacking
        else:
            self.variants[baseline].update(range(lacking))

    def _begins_block(self, baseline: str, round_: int) -> bool:
        """Whether one more cell of a round needs another run of its baseline."""
        beside = self.variants[baseline][round_]
        if not beside:
            return round_ >= self.own_rounds.get(baseline, 0)
        return beside % self.cells_per_block == 0
