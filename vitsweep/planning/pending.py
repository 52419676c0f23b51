"""Why a cell runs, or does not: what the records of a sweep folder say about the cells of a command.

A cell of a command is, in this order,

1. `invalid`: a rule refuses it, and `PlannedCell.reasons` says why;
2. `not measured`: its latest run ended as `failed`, `out_of_memory`, `diverged`, ... and it never was
   measured, or was `wrong` or `diverged` since: it would end the same way again, so it is repeated
   only on request (`sweep.retry`, `vitsweep retry`). A run that was killed or preempted says
   nothing about its cell and is repeated, and so is one that had less time than the command gives;
3. `measured`: it has as many blocks as `measurement.blocks` asks for;
4. `pruned after screening`: its screening run, or its first block where there is none, was slower than its
   baseline by more than `sweep.prune_slowdown`, and nobody typed a number of blocks;
5. `runnable`: it lacks some blocks.

What counts is pairs, not runs: a block counts for a cell if both the cell and its baseline were
measured in it, because only then the block yields a ratio. A baseline that was killed in one block
therefore leaves every cell of that block one block short.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from rich.console import Console

from vitsweep.composition.hydra import key_of, value_override
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.execution.code_hash import MOST_FILES, changed_files
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import (
    CHOOSING,
    SCHEMA_VERSION,
    STOPPED_FROM_OUTSIDE,
    RunRecord,
    Status,
)
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten, twin_settings
from vitsweep.spec.measurement import MIN_BLOCKS, OF_COMMAND
from vitsweep.spec.menu import choices, content_of
from vitsweep.tables.blocks import share_nodes
from vitsweep.tables.valid_runs import DISQUALIFYING

# Which records of a sweep folder a command may use.


CodeHash = str


@dataclass
class UsableRuns:
    """The runs that may count for the cells of a command, in the order in which they began.

    Attributes:
        own: of the code as it is now.
        other_code: cell id -> latest code, not the present one, by which the cell was measured, for
            cells that the present code has not measured.
        unproved: cells that were measured, but never with the proof that the command wants.
        screened: measured screening runs of the code as it is now; they count for nothing else.
        latest: cell id -> its latest run, of the present code where there is one.
    """

    own: list[RunRecord] = field(default_factory=list)
    other_code: dict[str, CodeHash] = field(default_factory=dict)
    unproved: list[str] = field(default_factory=list)
    screened: list[RunRecord] = field(default_factory=list)
    latest: dict[str, RunRecord] = field(default_factory=dict)
    _accepted: dict[str, dict[CodeHash, list[RunRecord]]] = field(default_factory=dict)

    def by_code(self, cell_id: str) -> Mapping[CodeHash, list[RunRecord]]:
        """Return the runs of a cell by code, those of other code only where that is accepted."""
        return self._accepted.get(cell_id, {})

    def is_measured_by_other_code(self, cell_id: str) -> bool:
        """Tell whether accepted runs of other code measured the cell."""
        runs = (run for some in self.by_code(cell_id).values() for run in some)
        return any(run.status == Status.measured for run in runs)


def usable_runs(
    runs: Iterable[RunRecord],
    plan: SweepPlan,
    torch_version: str,
    accepts_any_code: bool,
    *,
    are_own: bool = False,
) -> UsableRuns:
    """Sort out the runs that may count for the cells of a plan.

    A run counts if cell, device type, torch's minor version, schema and code are the same, if it was
    proved where the command wants a proof, and if its window was as long as the command wants.
    Runs of other code are kept separately: they count where the user accepts that, and only if they are
    all that a cell needs. They are never taken together with runs of the present code.

    Args:
        runs: records of the store.
        plan: the cells of the command.
        torch_version: that would measure now.
        accepts_any_code: `sweep.accept_code=any`.
        are_own: the command itself measured them, so that their code is the present one.
    """
    found, entries = UsableRuns(), plan.entries
    earlier = [run for run in runs if run.cell_id in entries]
    for run in sorted(earlier, key=lambda run: str(run.environment.get("started_at") or "")):
        entry, cell_id = entries[run.cell_id], run.cell_id
        device = entry.spec.resources.device
        of_run = str(run.environment.get("torch") or torch_version)
        if (
            run.schema_version != SCHEMA_VERSION
            or run.environment.get("device_type", device) != device
            or of_run.split(".")[:2] != torch_version.split(".")[:2]
        ):
            continue
        code = str(run.environment.get("code_hash", ""))
        is_own = are_own or code == entry.code.hash
        if run.is_screening and run.status == Status.measured:
            found.screened += [run] if is_own else []
            continue
        wanted, is_measured = entry.spec.measurement, run.status == Status.measured
        traced = run.spec.get("measurement.traced_steps", inf) if "trace" in run.samples else 0
        if (is_measured and traced < wanted.traced_steps) or _had_less_time(run, entry):
            continue
        if is_measured and not is_own:
            found.other_code[cell_id] = code
        if not is_own and not accepts_any_code:
            continue
        if is_measured and wanted.prove != "none" and not _is_proved(run, entry):
            found.unproved.append(cell_id)
            continue
        found._accepted.setdefault(cell_id, {}).setdefault(code, []).append(run)
        if is_own:
            found.own.append(run)
        found.latest[cell_id] = run
    found.latest |= {run.cell_id: run for run in found.own}
    measured = {run.cell_id for run in found.own if run.status == Status.measured}
    for cell_id in measured:
        found.other_code.pop(cell_id, None)
    found.unproved = [c for c in dict.fromkeys(found.unproved) if c not in measured]
    return found


def _is_proved(run: RunRecord, entry: PlannedCell) -> bool:
    """Tell whether the cell was proved on the small module that the command names."""
    return bool(run.validity.get("proved")) and twin_settings(run.spec) == entry.spec.twin


def _had_less_time(run: RunRecord, entry: PlannedCell) -> bool:
    """Tell whether a run was given less time than the command gives; a record may not say."""
    wanted = entry.spec.measurement
    if run.status == Status.timed_out:
        return bool(run.spec.get("measurement.timeout_min", inf) < wanted.timeout_min)
    if run.validity.get("short_window") and run.status == Status.measured:
        return bool(run.spec.get("measurement.max_seconds", inf) < wanted.max_seconds)
    return run.status == Status.measured and any(
        run.spec.get(f"measurement.{name}", inf) < getattr(wanted, name)
        for name in ("min_seconds", "warmup_min_seconds")
    )


KILLS_IN_A_ROW = 3
"""A cell that was killed so often in a row is not tried again by the same command."""

MeasuredBlocks = dict[str, dict[str, Any]]
"""Cell id -> block -> nodes on which the cell was measured in that block, None where unknown."""


class CellState(StrEnum):
    """What a command does with a cell."""

    runnable = "runnable"
    invalid = "invalid"
    measured = "measured"
    pruned = "pruned after screening"
    not_measured = "not measured"


@dataclass(frozen=True)
class ResumeState:
    """What is measured already, and what a command therefore still has to run.

    Attributes:
        missing_blocks: cell id -> blocks that it lacks, at least 1. Baselines that the command does
            not name run in the blocks of the cells that need them and are not listed.
        not_measured: cell id -> its latest run, of cells that are not repeated.
        slowdowns: cell id -> how many times slower than its baseline the cell was in its latest screening
            run, or in its first block where it has none.
        pruned: cells without blocks because they are so slow, and baselines of such cells alone.
        first: cells without a run so far, whose first block takes the place of a screening run.
        used_again: baselines that run again with cells that lack blocks.
        changed_code: cell id -> hash of the code that measured it; the code has changed since, so
            that the cell is measured anew.
        accepted_code: the same for cells that count as measured nevertheless; the hash is "" where
            the records are from before runs named their code.
        unproved: cells that were measured without the proof that this command wants.
        lacking: cells that count as measured -> overrides typed for it that none of its runs had.
    """

    missing_blocks: dict[str, int]
    not_measured: dict[str, RunRecord]
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    pruned: frozenset[str] = frozenset()
    used_again: frozenset[str] = frozenset()
    changed_code: Mapping[str, str] = field(default_factory=dict)
    accepted_code: Mapping[str, str] = field(default_factory=dict)
    unproved: tuple[str, ...] = ()
    first: frozenset[str] = frozenset()
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def cell_state(self, entry: PlannedCell) -> CellState:
        """Return what the command does with a cell."""
        if entry.reasons:
            return CellState.invalid
        if entry.cell_id in self.not_measured:
            return CellState.not_measured
        if entry.cell_id in self.missing_blocks:
            return CellState.runnable
        if entry.cell_id in self.used_again:
            return CellState.runnable
        return CellState.pruned if entry.cell_id in self.pruned else CellState.measured

    def reasons(self, entry: PlannedCell) -> list[str]:
        """Return why a cell is not run; empty where it is, or where it is measured."""
        if run := self.not_measured.get(entry.cell_id):
            return [f"{run.status}: {run.reason}"]
        return list(entry.reasons)


def resume_state(
    plan: SweepPlan,
    runs: Iterable[RunRecord],
    settings: SweepSettings,
    torch_version: str,
    of_this_command: Sequence[RunRecord] = (),
    pending: Iterable[tuple[str, str]] = (),
) -> ResumeState:
    """Compare a command with what is measured.

    Args:
        plan: the cells of the command.
        runs: records that were in the store when the command began.
        settings: of the sweep; with `remeasure` none of `runs` counts, and cells that ended with a
            status in `retry` run again.
        torch_version: that would measure now.
        of_this_command: records that the command itself has added since, oldest first. A cell that
            was not measured in one of them is not tried again, unless something from outside stopped
            the run; that is repeated until it happens `KILLS_IN_A_ROW` times in a row.
        pending: (cell id, block) of runs that jobs of a cluster will still do; they count as measured.
    """
    earlier = () if settings.remeasure else runs
    accepts_any = settings.accept_code == "any"
    before = usable_runs(earlier, plan, torch_version, accepts_any)
    now = usable_runs(of_this_command, plan, torch_version, accepts_any, are_own=True)
    decides = settings.search == "grid" and not settings.limit.key
    first = {  # whose first block decides whether others follow
        e.cell_id
        for e in plan.runnable
        if decides and not has_screening(e, settings) and not e.spec.task.epochs
        if e.spec.measurement.blocks >= MIN_BLOCKS
    }
    measured = [run for run in [*before.own, *now.own] if run.status == Status.measured]
    traced = {run.cell_id for run in measured if run.spec.get("measurement.trace")}
    awaited: MeasuredBlocks = {}
    for cell_id, block in pending:
        awaited.setdefault(cell_id, {}).setdefault(block, None)
    own = _measured_blocks([*before.own, *now.own])
    own = {c: awaited.get(c, {}) | own.get(c, {}) for c in own.keys() | awaited.keys()}
    repeated = (*STOPPED_FROM_OUTSIDE, Status.measured, *settings.retry)
    not_measured = {  # whose earlier runs say so, or that this command does not try again
        cell_id: run
        for cell_id, run in before.latest.items()
        if run.status not in repeated
        if run.status in DISQUALIFYING
        or not (cell_id in own or before.is_measured_by_other_code(cell_id))
    } | _given_up(now.own)
    screened = [*before.screened, *now.screened]
    slowdowns = _slowdowns(plan, screened)
    in_first_block = _slowdowns(plan, [*reversed(measured), *screened])
    slowdowns |= {c: slowdown for c, slowdown in in_first_block.items() if c in first}
    pruned: set[str] = set()
    missing: dict[str, int] = {}
    for entry in plan.runnable:
        if entry.cell_id in not_measured:
            continue
        others = (e for e in plan.runnable if e.baseline_id == entry.cell_id and e is not entry)
        if entry.is_added_baseline and any(others):
            continue
        lacking = _num_missing(entry, plan, own, not_measured)
        if lacking > 0 and _is_complete_by_other_code(entry, plan, before, not_measured):
            lacking = 0
        if entry.spec.measurement.trace and entry.cell_id not in awaited.keys() | traced:
            lacking = max(lacking, 1)
        if lacking > 0 and is_pruned(entry, slowdowns.get(entry.cell_id, 0.0), settings):
            pruned.add(entry.cell_id)
        elif lacking > 0:
            missing[entry.cell_id] = lacking
    for cell_id in lone_baselines(plan, pruned) & missing.keys():
        if not has_typed_blocks(plan.entries[cell_id]):
            pruned.add(cell_id)
            del missing[cell_id]
    beside = {plan.entries[cell_id].baseline_id for cell_id in missing} - missing.keys()
    again = missing.keys() | beside
    other = before.other_code
    kept = [] if of_this_command else [e for e in plan.runnable if e.cell_id not in again]
    return ResumeState(
        missing,
        not_measured,
        slowdowns,
        frozenset(pruned),
        used_again=frozenset(cell_id for cell_id in beside if cell_id),
        changed_code={c: h for c, h in other.items() if c in again and c not in before.unproved},
        accepted_code={c: h for c, h in other.items() if c not in again and c not in not_measured},
        unproved=tuple(cell_id for cell_id in before.unproved if cell_id in again),
        first=frozenset(first - {run.cell_id for run in measured}),
        lacking={e.cell_id: typed for e in kept if (typed := _lacking(e, before))},
    )


def has_screening(entry: PlannedCell, settings: SweepSettings) -> bool:
    """Whether screening runs come before the blocks of a cell: by `sweep.screening`, else by its device."""
    if settings.screening == "auto":
        return entry.spec.resources.device == "cpu" or settings.minutes is not None
    return settings.screening


def _slowdowns(plan: SweepPlan, screened: Sequence[RunRecord]) -> dict[str, float]:
    """Return how many times slower than its baseline each cell was in the latest block of screening runs."""
    speed = {(r.block, r.cell_id): r.metrics.get("images_per_second") or 0.0 for r in screened}
    found = {}
    for (block, cell_id), own in speed.items():
        baseline = plan.entries[cell_id].baseline_id
        beside = speed.get((block, baseline or ""), 0.0)
        if own and beside and baseline != cell_id:
            found[cell_id] = beside / own
    return found


def is_pruned(entry: PlannedCell, slowdown: float, settings: SweepSettings) -> bool:
    """Whether a cell gets no more than its screening run, which was so many times slower."""
    most = settings.prune_slowdown if settings.search == "grid" else None
    return most is not None and slowdown > most and not has_typed_blocks(entry)


def lone_baselines(plan: SweepPlan, pruned: Collection[str]) -> set[str]:
    """Return the baselines of which all cells that can run are pruned: their blocks would compare nothing."""
    variants = [e for e in plan.runnable if e.baseline_id not in (None, e.cell_id)]
    used = {e.baseline_id for e in variants if e.cell_id not in pruned}
    return {e.baseline_id for e in variants if e.baseline_id and e.baseline_id not in used}


def has_typed_blocks(entry: PlannedCell) -> bool:
    """Return whether the number of blocks was typed for a cell: it is measured in full then."""
    return any(
        text.lstrip("+").startswith("measurement.blocks=") for text in entry.composed.overrides
    )


def _measured_blocks(runs: Iterable[RunRecord]) -> MeasuredBlocks:
    found: MeasuredBlocks = {}
    for run in runs:
        if run.status == Status.measured and run.purpose != CHOOSING:  # which enter no interval
            found.setdefault(run.cell_id, {})[run.block] = run.environment.get("nodes_used")
    return found


def _is_complete_by_other_code(
    entry: PlannedCell,
    plan: SweepPlan,
    before: UsableRuns,
    not_measured: Mapping[str, RunRecord],
) -> bool:
    """Tell whether one accepted state of other code measured all blocks of a cell and its baseline."""
    baseline = plan.entries.get(entry.baseline_id or "", entry)
    partners = before.by_code(baseline.cell_id)
    for runs in before.by_code(entry.cell_id).values():
        for others in partners.values():
            measured = _measured_blocks([*runs, *others])
            if _num_missing(entry, plan, measured, not_measured) <= 0:
                return True
    return False


HAVE_RULES = {*OF_COMMAND} - {"fewest_steps", "start"}
"""Fields of `measurement` that say which runs count, see `usable_runs`."""


def _lacking(entry: PlannedCell, before: UsableRuns) -> list[str]:
    """Return the overrides, of settings outside of the id, that no run of a measured cell had.

    What a file of the user's sets counts as if it were typed.
    """
    of_command = entry.spec.of_command
    known = {f"{group}.{name}" for group, part in of_command.items() for name in part}
    known -= {f"measurement.{name}" for name in HAVE_RULES}
    typed = {t: ".".join(key_of(t).split(".")[:2]) for t in entry.composed.overrides}
    for group in {"task", "model"} & of_command.keys():
        choice = getattr(entry.spec, group).name
        menu = content_of(group, choice) if choice in choices(group) else {}
        for name, value in of_command[group].items():
            if value not in (None, {}, menu.get(name)) and f"{group}.{name}" not in typed.values():
                typed[value_override(f"{group}.{name}", value)] = f"{group}.{name}"
    runs = [run for some in before.by_code(entry.cell_id).values() for run in some]
    specs = [run.spec for run in runs if run.status == Status.measured]
    if not specs or not known & {*typed.values()}:
        return []
    asked = flatten(entry.spec)
    return [
        text
        for text, key in typed.items()
        if key in known and all(_below(key, asked) != _below(key, spec) for spec in specs)
    ]


def _below(key: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if f"{k}.".startswith(f"{key}.") and v is not None}


def _num_missing(
    entry: PlannedCell,
    plan: SweepPlan,
    measured: MeasuredBlocks,
    not_measured: Mapping[str, RunRecord],
) -> int:
    own = measured.get(entry.cell_id, {})
    baseline = plan.entries.get(entry.baseline_id or "")
    if baseline is None or baseline is entry or baseline.cell_id in not_measured:
        return entry.spec.measurement.blocks - len(own)
    beside = measured.get(baseline.cell_id, {})
    pairs = [b for b, nodes in own.items() if b in beside and share_nodes(nodes, beside[b])]
    return entry.spec.measurement.blocks - len(pairs)


def _given_up(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return the cells that this command does not try again, each with its latest run."""
    kills: Counter[str] = Counter()
    found: dict[str, RunRecord] = {}
    for run in runs:
        kills[run.cell_id] = kills[run.cell_id] + 1 if run.status in STOPPED_FROM_OUTSIDE else 0
        is_result = run.status not in (*STOPPED_FROM_OUTSIDE, Status.measured)
        if is_result or kills[run.cell_id] >= KILLS_IN_A_ROW:
            found[run.cell_id] = run
    return found


# What a command says about its cells and the records it found, before anything runs.


def print_notices(
    state: ResumeState, plan: SweepPlan, store: Store, how_to_repeat: str, console: Console
) -> None:
    """Say which cells are measured anew and why, which are used as they are, and which not repeated.

    Args:
        state: of the cells.
        plan: the cells of the command.
        store: names the files of earlier states of the code.
        how_to_repeat: what measures again the cells that are not repeated.
        console: where messages go.
    """
    lines = list[str]()
    if state.changed_code:
        lines.append(
            f"{_cells(state.changed_code)} measured anew, because code that computes them has "
            f"changed{_where(state.changed_code, plan, store)}. The earlier runs are kept; "
            "`sweep.accept_code=any` uses them where they are complete."
        )
    if state.accepted_code:
        lines.append(
            f"{_cells(state.accepted_code)} used as measured by other code (`sweep.accept_code=any`)"
            f"{_where(state.accepted_code, plan, store)}."
        )
    if state.unproved:
        lines.append(
            f"{_cells(state.unproved)} measured again, because the earlier runs lack the proof that "
            "this command wants (`measurement.prove=twin`)."
        )
    if state.lacking:
        typed = dict.fromkeys(f"`{text}`" for texts in state.lacking.values() for text in texts)
        lines.append(
            f"{_cells(state.lacking)} measured without {', '.join(typed)}: the records stay as they are; "
            "`sweep.remeasure=true` at the end of the command measures with it."
        )
    if state.not_measured:
        lines.append(
            f"{_cells(state.not_measured)} not measured: the runs ended otherwise and are not repeated; "
            f"{how_to_repeat}."
        )
    for line in lines:
        console.print(line)  # rich reads a list in brackets as a style


def _cells(cells: Collection[str]) -> str:
    return "1 cell is" if len(cells) == 1 else f"{len(cells)} cells are"


def _where(codes: Mapping[str, str], plan: SweepPlan, store: Store) -> str:
    """Return the changed files in brackets; nothing where they are not known."""
    names: dict[str, None] = {}
    for cell_id, code in codes.items():
        if before := store.code_files(code):
            now = plan.entries[cell_id].code.files
            names |= dict.fromkeys(changed_files(before, now))
    if not names:
        return ""
    shown, more = list(names)[:MOST_FILES], len(names) - MOST_FILES
    return f" ({', '.join(shown)}{f' and {more} other files' if more > 0 else ''})"
