"""Which records of a sweep folder a command may use."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import SCHEMA_VERSION, RunRecord, Status

CodeHash = str
UNKNOWN_CODE: CodeHash = ""
"""Of records from before runs named their code."""


@dataclass
class UsableRuns:
    """The runs that may count for the cells of a command, in the order in which they began.

    Attributes:
        own: of the code as it is now.
        other_code: cell id -> latest code, not the present one, by which the cell was measured, for
            cells that the present code has not measured.
        unproved: cells that were measured, but never with the proof that the command wants.
        latest: cell id -> its latest run, of the present code where there is one.
    """

    own: list[RunRecord] = field(default_factory=list)
    other_code: dict[str, CodeHash] = field(default_factory=dict)
    unproved: list[str] = field(default_factory=list)
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
    Runs of other code are kept apart: they count where the user accepts that, or where a record
    is from before runs named their code, and only if they are all that a cell needs. They are
    never taken together with runs of the present code.

    Args:
        runs: records of the store.
        plan: the cells of the command.
        torch_version: that would measure now.
        accepts_any_code: `sweep.accept_code=any`.
        are_own: the command itself measured them, so that their code is the present one.
    """
    found = UsableRuns()
    entries = plan.entries
    earlier = [run for run in runs if run.cell_id in entries]
    for run in sorted(earlier, key=_began):
        entry, cell_id = entries[run.cell_id], run.cell_id
        if not comparable(run, entry, torch_version) or _had_less_time(run, entry):
            continue
        code = run.environment.get("code_hash") or UNKNOWN_CODE
        is_own = are_own or code == entry.code.hash
        if run.status == Status.measured and not is_own:
            found.other_code[cell_id] = code
        if not is_own and code != UNKNOWN_CODE and not accepts_any_code:
            continue
        if run.status == Status.measured and not _is_proved(run, entry):
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


def comparable(run: RunRecord, entry: PlannedCell, torch_version: str) -> bool:
    """Tell whether a run was measured on the same kind of machine and with the same torch."""
    of_run = str(run.environment.get("torch") or torch_version)
    return (
        run.schema_version == SCHEMA_VERSION
        and run.environment.get("device_type", entry.spec.resources.device)
        == entry.spec.resources.device
        and of_run.split(".")[:2] == torch_version.split(".")[:2]
    )


def _is_proved(run: RunRecord, entry: PlannedCell) -> bool:
    return entry.spec.measurement.prove == "none" or bool(run.validity.get("proved"))


def _had_less_time(run: RunRecord, entry: PlannedCell) -> bool:
    """Tell whether a run was given less time than the command gives; a record may not say."""
    wanted = entry.spec.measurement
    if run.status == Status.timed_out:
        return bool(run.spec.get("measurement.timeout_min", inf) < wanted.timeout_min)
    return run.status == Status.measured and any(
        run.spec.get(f"measurement.{name}", inf) < getattr(wanted, name)
        for name in ("min_seconds", "warmup_min_seconds")
    )


def _began(run: RunRecord) -> str:
    return str(run.environment.get("started_at") or "")
