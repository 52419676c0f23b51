"""Blocks: cells and their baselines that run back to back, in a balanced order.

A block holds one run of its baseline. A second one would lower the variance of each log ratio from
s^2 (1 + 1/1) to s^2 (1 + 1/2), s^2 being the variance between runs, but lengthens the block by a run.
At equal cost the 95 % interval becomes, on average, 1 % wider with 4 cells (6 blocks of 5 runs against
5 of 6), 4 % narrower with 8 cells and the usual 5 blocks, 7 % narrower with 8 cells and 10 blocks,
since the t distribution loses degrees of freedom with the blocks
(`test_a_second_baseline_run_hardly_narrows_intervals`). That is too little to give up that a cell runs
once per block, on which resuming, samples and tables rely.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
from pandas import DataFrame

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.execution.attempts import Attempt, attempts
from vitsweep.execution.run_request import needs_warm_up
from vitsweep.planning.pending import ResumeState, has_screening, has_typed_blocks
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import SCREENING, STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count
from vitsweep.tables.stats import POWER, assigned, least_blocks, minimum_detectable_effect

RUN_PARTS = 4
"""A run takes about as long as four windows: start and proof, warm-up, window, memory and phases."""


@dataclass(frozen=True)
class Block:
    """Cells to be run back to back.

    Attributes:
        name: unique over all sweeps and machines, so that records can be merged.
        entries: in the order in which they run.
        first_position: position of the first of them in the block; above 0 where runs that were
            stopped from outside are repeated at the end of their block.
        purpose: of its runs, see `results.record.SCREENING`.
        first: cells of which the run here is the first, and takes the place of a screening run.
    """

    name: str
    entries: tuple[PlannedCell, ...]
    first_position: int = 0
    purpose: str = ""
    first: frozenset[str] = frozenset()

    @property
    def is_screening(self) -> bool:
        """Whether they are screening runs, see `screenings`."""
        return self.purpose == SCREENING


class BalancedOrder:
    """Orders the cells of blocks so that no cell is favoured by its position.

    The first run of a block may be slow (cold caches, a clock that rises), and a machine may warm up
    during a block. Over the blocks that some cells share, each cell is equally often at each
    position, within one: k blocks of k cells are a Latin square. Among these orders the one is taken
    in which the mean positions differ least. Every second block is then the reverse of the one before,
    as far as the square allows (ABBA for two cells): a linear drift within blocks cancels, and a cell
    follows another as often as it precedes it, which is what a Williams design balances. The rest is
    random: which cell begins is drawn anew for each sweep.

    Each order is an optimal assignment of cells to positions, given how often the cells were at each
    position before; a Latin square can always be continued so, since what it has not used yet is a
    regular bipartite graph (König).

    Args:
        past: blocks that ran before, each as the ids of its cells in the order in which they ran.
        seed: of the random part; drawn where not given.
    """

    def __init__(self, past: Iterable[Sequence[str]] = (), seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self._past: list[dict[str, float]] = []
        self._blocks_of: dict[str, list[int]] = {}
        for cells in past:
            self._remember(cells)

    @classmethod
    def after(cls, runs: Iterable[RunRecord]) -> "BalancedOrder":
        """Return an order that takes into account where the cells stood in earlier blocks."""
        found: dict[str, list[RunRecord]] = {}
        for run in runs:
            if run.status == Status.measured and not run.is_screening:
                found.setdefault(run.block, []).append(run)
        ordered = (sorted(block, key=lambda run: run.position) for block in found.values())
        return cls([run.cell_id for run in block] for block in ordered)

    def next_block(self, cells: Sequence[str]) -> list[str]:
        """Return the cells of the next block in the order in which they run."""
        num_cells = len(cells)
        places = np.linspace(0.0, 1.0, num_cells)
        before = np.zeros((num_cells, num_cells))
        lead = np.zeros(num_cells)
        rarest_first = sorted(cells, key=lambda cell: len(self._blocks_of.get(cell, ())))
        others = rarest_first[:-1] or rarest_first  # a shared baseline may be in thousands
        for index in {index for cell in others for index in self._blocks_of.get(cell, ())}:
            if sum(cell in self._past[index] for cell in cells) < min(2, num_cells):
                continue
            for row, cell in enumerate(cells):
                if (place := self._past[index].get(cell)) is not None:
                    before[row, round(place * (num_cells - 1))] += 1
                    lead[row] += place - 0.5
        imbalance = (lead[:, None] + places[None, :] - 0.5) ** 2
        noise = self._random.uniform(size=before.shape)
        rows, columns = assigned(1e4 * before + 10 * imbalance + 1e-3 * noise)
        ordered = [cells[row] for _, row in sorted(zip(columns, rows, strict=True))]
        self._remember(ordered)
        return ordered

    def _remember(self, cells: Sequence[str]) -> None:
        for cell in cells:
            self._blocks_of.setdefault(cell, []).append(len(self._past))
        last = max(len(cells) - 1, 1)
        self._past.append({cell: place / last for place, cell in enumerate(cells)})


def blocks(
    plan: SweepPlan,
    missing: Mapping[str, int],
    cells_per_block: int,
    order: BalancedOrder | None = None,
) -> Iterator[Block]:
    """Yield the blocks that give every cell what it lacks, if all runs are measured.

    A block holds some cells and the baseline of each, so that every ratio is taken between runs
    minutes from each other. Large sweeps are cut into several blocks per round, each with its own
    baseline runs. All cells get their first block before any gets its second.

    Args:
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        cells_per_block: cells of one block, baselines not counted.
        order: of the cells within blocks; one that knows of no earlier blocks where not given.
    """
    order = order or BalancedOrder()
    for members in members_of_blocks(plan, missing, cells_per_block):
        yield block_of(plan, members, order)


def screenings(plan: SweepPlan, state: ResumeState, settings: SweepSettings) -> Iterator[Block]:
    """Yield the screening runs that a grid begins with, one by one: each cell once, as short as can be.

    A screening run shows within seconds which cells are worth their blocks (see `pending.is_pruned`), and
    warms the machine up. It enters no interval. The baseline comes first, so that each ends with a ratio.

    Args:
        plan: the cells.
        state: what is missing; a cell that has a screening run, or a block, needs none.
        settings: of the sweep.
    """
    if settings.prune_slowdown is None or settings.limit.key or settings.search != "grid":
        return
    wanted = {
        c: 1
        for c in state.missing_blocks
        if has_screening(plan.entries[c], settings) and _needs_screening(plan.entries[c], state)
    }
    for members in members_of_blocks(plan, wanted, settings.cells_per_block):
        entries = sorted(_with_baselines(plan, members), key=lambda e: e.cell_id != e.baseline_id)
        name = secrets.token_hex(5)
        for position, entry in enumerate(entries):
            yield Block(name, (entry,), position, SCREENING)


def num_screenings(plan: SweepPlan, state: ResumeState, settings: SweepSettings) -> "Counter[str]":
    """Return cell id -> 1 for each cell that gets a screening run first, the baselines among them."""
    return Counter(e.cell_id for block in screenings(plan, state, settings) for e in block.entries)


def seconds_of_block(block: Block, records: Iterable[RunRecord]) -> float:
    """Return how long a block takes, by the latest run of each of its cells; 0 of a cell without one.

    A screening run is shorter than a run by the least length of warm-up and window at most.
    """
    full: dict[str, float] = {}
    screened: dict[str, float] = {}
    for run in records:
        kept = screened if run.is_screening else full
        kept[run.cell_id] = float(run.environment.get("run_seconds") or 0.0)

    def seconds(entry: PlannedCell) -> float:
        low = screened.get(entry.cell_id, 0.0)
        return full.get(entry.cell_id, low + seconds_beyond_screening(entry) if low else 0.0)

    return sum(map(seconds, block.entries))


def seconds_beyond_screening(entry: PlannedCell) -> float:
    """Return by how much a run is longer than a screening run at most, where its steps are short."""
    return entry.spec.measurement.warmup_min_seconds + entry.spec.measurement.min_seconds


def within_minutes(plan: SweepPlan, minutes: float) -> SweepPlan:
    """Return a plan whose runs are so short that a block of two, three times over, fits into the minutes.

    `measurement.max_seconds` bounds warm-up and window; it is no identity. The result depends on the
    minutes alone, so that the same command again uses the blocks of the one before.
    """
    most = 60 * minutes / (RUN_PARTS * 2 * MIN_BLOCKS)

    def cut(entry: PlannedCell) -> PlannedCell:
        measurement = entry.spec.measurement
        if measurement.max_seconds <= most:
            return entry
        return replace(
            entry, spec=replace(entry.spec, measurement=replace(measurement, max_seconds=most))
        )

    return SweepPlan({cell_id: cut(entry) for cell_id, entry in plan.entries.items()})


def _needs_screening(entry: PlannedCell, state: ResumeState) -> bool:
    blocks = entry.spec.measurement.blocks
    return (
        entry.baseline_id not in (None, entry.cell_id, *state.not_measured)
        and entry.cell_id not in state.slowdowns
        and state.missing_blocks[entry.cell_id] == blocks >= MIN_BLOCKS
        and not entry.spec.task.epochs
        and not has_typed_blocks(entry)
    )


def repeated_runs(block: Block, runs: Sequence[RunRecord], state: ResumeState) -> Block | None:
    """Return the runs of a block to be repeated because something from outside stopped them.

    They belong to the same block: repeated at its end, they are still minutes from the others.

    Args:
        block: has just run.
        runs: its records, oldest first.
        state: after it; what it gives up is not repeated.
    """
    latest = {run.cell_id: run.status for run in runs if run.block == block.name}
    stopped = tuple(
        entry
        for entry in block.entries
        if latest.get(entry.cell_id) in STOPPED_FROM_OUTSIDE
        and entry.cell_id not in state.not_measured
    )
    again = replace(block, entries=stopped, first_position=len(block.entries))
    return again if stopped else None


def runs_per_cell(
    plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int
) -> "Counter[str]":
    """Return cell id -> runs that the missing blocks take, those of the baselines among them."""
    members = members_of_blocks(plan, missing, cells_per_block)
    return Counter(entry.cell_id for some in members for entry in _with_baselines(plan, some))


def warm_up_cell(block: Block) -> PlannedCell | None:
    """Return the baseline of the first block of a command, or the first cell, where `needs_warm_up`."""
    baselines = {entry.baseline_id for entry in block.entries}
    own = [entry for entry in block.entries if entry.cell_id in baselines]
    needed = needs_warm_up([entry.spec for entry in block.entries])
    return [*own, *block.entries][0] if needed else None


def comparisons(entries: Sequence[PlannedCell], size: int) -> Iterator[list[PlannedCell]]:
    """Keep cells with the same baseline together; a baseline alone joins its own cells."""
    groups: dict[str | None, list[PlannedCell]] = {}
    for entry in entries:
        groups.setdefault(entry.baseline_id, []).append(entry)
    for group in groups.values():
        variants = [e for e in group if e.baseline_id != e.cell_id]
        baselines = [e for e in group if e.baseline_id == e.cell_id]
        for start in range(0, len(variants), size):
            yield variants[start : start + size]
        if baselines and not variants:
            yield baselines


def members_of_blocks(
    plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int
) -> Iterator[list[PlannedCell]]:
    """Yield the cells of each block, round after round, baselines not added yet.

    Args:
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        cells_per_block: cells of one block, baselines not counted.
    """
    for round_ in range(max(missing.values(), default=0)):
        lacking = [e for e in plan.runnable if missing.get(e.cell_id, 0) > round_]
        yield from comparisons(lacking, cells_per_block)


def _with_baselines(plan: SweepPlan, members: Iterable[PlannedCell]) -> list[PlannedCell]:
    needed = {e.cell_id: e for e in members}
    needed |= {b: plan.entries[b] for e in [*needed.values()] if (b := e.baseline_id)}
    return list(needed.values())


def block_of(
    plan: SweepPlan,
    members: Iterable[PlannedCell],
    order: BalancedOrder,
    state: ResumeState | None = None,
) -> Block:
    """Return a block of some cells with their baselines, without those that are not measured."""
    state = state or ResumeState({}, {})
    entries = {e.cell_id: e for e in _with_baselines(plan, members)}
    cells = order.next_block([c for c in entries if c not in state.not_measured])
    return Block(secrets.token_hex(5), tuple(entries[c] for c in cells))


# Trainings that were interrupted on this machine and saved: the same command continues them.


def interrupted_trainings(
    store: Store, code_hashes: Mapping[str, str], runs: Iterable[RunRecord]
) -> list[Attempt]:
    """Return the interrupted runs of some cells, oldest first, each by its latest attempt.

    Its `saved_step` is that of the latest attempt that saved the training.

    Jobs of a cluster continue their own runs. A run that was begun by other code is begun anew: half
    of it would be measured with each.

    Args:
        store: of the sweep.
        code_hashes: cell id -> hash of its code as it is now, for the cells in question.
        runs: records of the store.
    """
    names = [run.run_id for run in runs]
    return [
        training
        for cell_id, code_hash in code_hashes.items()
        for training in _of_cell(store, cell_id)
        if training.code_hash == code_hash
        and not any(name.startswith(training.run.name) for name in names)
    ]


def _of_cell(store: Store, cell_id: str) -> list[Attempt]:
    """Return the latest attempt at each run that was saved, with the step at which it was saved last."""
    latest: dict[str, Attempt] = {}
    for attempt in attempts(store, cell_id):
        if attempt.job is None:
            if attempt.saved_step is None and (before := latest.get(attempt.run.name)):
                attempt = replace(attempt, saved_step=before.saved_step)
            latest[attempt.run.name] = attempt
    return [attempt for attempt in latest.values() if attempt.saved_step is not None]


def blocks_to_complete(
    interrupted: Sequence[Attempt],
    plan: SweepPlan,
    missing: Mapping[str, int],
    runs: Iterable[RunRecord],
    cells_per_block: int,
) -> list[Block]:
    """Return the blocks of interrupted runs.

    What such a run measures belongs to its block, so the block gets the cells that the run is
    compared with as well, as far as they lack blocks and are not in it yet.

    Args:
        interrupted: the runs to continue; they come first in their blocks.
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        runs: records of the store.
        cells_per_block: cells of one block, baselines not counted.
    """
    present, left, found = {(run.block, run.cell_id) for run in runs}, dict(missing), []
    for training in interrupted:
        entry = plan.entries[training.run.cell_id]
        members = {entry.cell_id: entry}
        if entry.baseline_id is not None:
            same = [e for e in plan.runnable if e.baseline_id == entry.baseline_id]
            lacking = [e for e in same if left.get(e.cell_id, 0) > 0][:cells_per_block]
            for other in (plan.entries[entry.baseline_id], *lacking):
                if (training.run.block, other.cell_id) not in present:
                    members.setdefault(other.cell_id, other)
        left |= {cell_id: left.get(cell_id, 0) - 1 for cell_id in members}
        found.append(Block(training.run.block, tuple(members.values())))
    return found


# How long one run of a cell takes, given its step time: set-up, timed steps, training.


SETUP_SECONDS = 15.0
"""Start of the processes, imports, rendezvous, model and proof of one run on several nodes (assumed)."""
INSTRUMENTED_STEPS = 4
"""Steps after the timed ones that measure memory and communication."""
FORWARD_SHARE = 1 / 3
"""Time of an evaluated image over that of a trained one: of the three products of each layer, two belong
to the backward pass."""


def run_seconds(
    cell: CellSpec, step_time_ms: float, setup_seconds: float = SETUP_SECONDS
) -> float | None:
    """Return the duration of one run; None for a training on an unknown number of images.

    Args:
        cell: the cell.
        step_time_ms: of a timed step.
        setup_seconds: from the start of the processes to the first step.
    """
    m, step = cell.measurement, step_time_ms / 1e3
    warm_up = max(m.warmup_steps * step, m.warmup_min_seconds)
    window = max(m.least_steps * step, m.min_seconds)
    if m.max_seconds < max(warm_up, window):
        warm_up = min(warm_up, max(m.max_seconds, step))
        window = min(window, max(m.max_seconds, 2 * step))
    after = (m.phase_steps + INSTRUMENTED_STEPS) * step
    training = training_seconds(cell, step_time_ms)
    return None if training is None else setup_seconds + warm_up + window + after + training


def training_seconds(cell: CellSpec, step_time_ms: float) -> float | None:
    """Return the duration of `task.epochs` with their evaluations, from newly initialised weights.

    It ends after its last epoch whether or not `task.target_accuracy` is reached before. Writing checkpoints
    is left out.

    Returns:
        0 where the cell does not train; None where the number of images is unknown.
    """
    if not cell.task.epochs:
        return 0.0
    sizes = cell.data.split_sizes()
    if sizes is None:
        return None
    train, test = sizes
    steps = cell.task.epochs * (train // cell.images_per_step)
    every = cell.task.evaluate_every_epochs
    num_evaluations = -(-cell.task.epochs // every) if every else 1  # the last epoch always is
    evaluated = num_evaluations * test / cell.images_per_step * FORWARD_SHARE
    return (steps + evaluated) * step_time_ms / 1e3


# What blocks can show before they run: the smallest difference that they would reveal.

ASSUMED_LOG_RATIO_SD = 0.05
"""Standard deviation of a log ratio between blocks where nothing was measured yet: 5 %."""

MIN_DEGREES = 4
"""Degrees of freedom below which a pooled standard deviation says too little to be used."""

MORE_BLOCKS = 11
"""Number of blocks that `plan` shows for comparison; that of `measurement=careful`."""


@dataclass(frozen=True)
class Noise:
    """How much log(variant / baseline) varies between blocks.

    Attributes:
        log_ratio_sd: standard deviation.
        num_ratios: log ratios that it was estimated from; 0 where it is assumed.
    """

    log_ratio_sd: float = ASSUMED_LOG_RATIO_SD
    num_ratios: int = 0


def noise_of(runs: Iterable[RunRecord], baselines: Mapping[str, str | None]) -> Noise:
    """Estimate the noise from records: the standard deviation within cells, pooled over cells.

    Args:
        runs: records of a sweep folder.
        baselines: cell id -> id of its baseline.
    """
    rows = [
        {
            "cell_id": run.cell_id,
            "sweep": run.sweep,
            "block": run.block,
            "images_per_second": run.metrics.get("images_per_second"),
            "device": run.environment.get("device"),
            "nodes_used": run.environment.get("nodes_used"),
        }
        for run in runs
        if run.status == Status.measured and not run.is_screening
    ]
    if not rows:
        return Noise()
    ratios = log_ratios(log_throughput_per_block(DataFrame(rows)), baselines)
    groups = ratios.groupby("cell_id", observed=True)["log_ratio"]
    degrees = groups.count() - 1
    if (total := int(degrees.sum())) < MIN_DEGREES:
        return Noise()
    squares = (groups.var().fillna(0.0) * degrees).sum()
    return Noise(sqrt(float(squares) / total), int(groups.count().sum()))


def describe_detectable_effect(plan: SweepPlan, noise: Noise) -> str:
    """Return a sentence about what the sweep can show; empty where it compares nothing."""
    compared, family = _compared(plan)
    if not compared:
        return ""
    num_blocks = min(entry.spec.measurement.blocks for entry in compared)
    if num_blocks < MIN_BLOCKS:
        return (
            f"measurement.blocks={num_blocks} gives no interval, so no difference can be shown: use "
            "measurement=standard, which has 5 blocks."
        )
    more = MORE_BLOCKS if num_blocks < MORE_BLOCKS else 2 * num_blocks

    def shown(blocks: int) -> str:
        return _percent(minimum_detectable_effect(blocks, family, noise.log_ratio_sd))

    source = (
        f"seen in {noise.num_ratios} ratios of this sweep"
        if noise.num_ratios
        else "assumed: this sweep has measured too little yet"
    )
    cells = count(family, "cell")
    return (
        f"{num_blocks} blocks detect a difference of {shown(num_blocks)} ({100 * POWER:.0f} % power, "
        f"{cells} compared); {more} blocks detect {shown(more)}. Standard deviation of a ratio "
        f"between blocks: {_percent(noise.log_ratio_sd)} ({source})."
    )


def describe_least_blocks(plan: SweepPlan) -> str:
    """Return a sentence on the blocks that an any-look interval needs; empty where nothing is compared."""
    compared, family = _compared(plan)
    if not compared:
        return ""
    least = least_blocks(family)
    return f"Nothing is claimed of a cell before {least} blocks ({count(family, 'cell')} compared)."


def _compared(plan: SweepPlan) -> tuple[list[PlannedCell], int]:
    """Return the cells that have a baseline, and the most that have one in common."""
    compared = [e for e in plan.runnable if e.baseline_id not in (None, e.cell_id)]
    return compared, max(Counter(e.baseline_id for e in compared).values(), default=0)


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"
