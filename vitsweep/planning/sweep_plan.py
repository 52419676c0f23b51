"""SweepPlan: the cells of one command, typed and checked, with their baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vitsweep.composition.composed_cell import ComposedCell, Tree
from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.machine import Machine
from vitsweep.spec.resolve import resolve
from vitsweep.spec.rules import conflicts


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """One cell of a command.

    Attributes:
        composed: as the command line asked for it.
        tree: resolved, as it will be frozen.
        spec: built from it.
        reasons: why it cannot run; empty if it can.
        baseline_id: cell its speedup divides by, or None.
        added: True where nobody asked for the cell but a speedup needs it.
    """

    composed: ComposedCell
    tree: Tree
    spec: CellSpec
    reasons: tuple[str, ...]
    baseline_id: str | None = None
    added: bool = False

    @cached_property
    def cell_id(self) -> str:
        """Id of the cell; hashing it takes a tenth of a millisecond, and it is asked for often."""
        return self.spec.cell_id


@dataclass(frozen=True)
class SweepPlan:
    """Entries by cell id: first the cells that were asked for, in their order, then baselines."""

    entries: dict[str, PlannedCell]

    @property
    def runnable(self) -> list[PlannedCell]:
        """Entries that no rule refuses."""
        return [entry for entry in self.entries.values() if not entry.reasons]

    @property
    def baselines(self) -> dict[str, str | None]:
        """Cell -> baseline cell."""
        return {key: entry.baseline_id for key, entry in self.entries.items()}


def make_sweep_plan(
    asked: Sequence[ComposedCell],
    machine: Machine,
    baseline_of: Callable[[ComposedCell], ComposedCell | None],
) -> SweepPlan:
    """Resolve, type and check all cells, and add the baselines that they need.

    Raises:
        BadValueError: a value is wrong; all wrong values of all cells are named.
    """
    entries: dict[str, PlannedCell] = {}
    problems: list[str] = []
    for cell in asked:
        try:
            entry = plan_cell(cell, machine)
        except BadValueError as error:
            problems += str(error).splitlines()
            continue
        entries.setdefault(entry.cell_id, entry)
    if problems:
        raise BadValueError("\n".join(dict.fromkeys(problems)))
    return SweepPlan(_with_baselines(entries, machine, baseline_of))


def plan_cell(asked: ComposedCell, machine: Machine) -> PlannedCell:
    """Resolve, type and check one cell."""
    tree = resolve(asked.tree, machine)
    cell = cell_from_tree(tree)
    return PlannedCell(composed=asked, tree=tree, spec=cell, reasons=tuple(conflicts(cell)))


def _with_baselines(
    entries: dict[str, PlannedCell],
    machine: Machine,
    baseline_of: Callable[[ComposedCell], ComposedCell | None],
) -> dict[str, PlannedCell]:
    complete, by_key = dict(entries), {}
    for entry in entries.values():
        wanted = baseline_of(entry.composed)
        if wanted is None or entry.reasons:
            continue
        if wanted.key not in by_key:
            by_key[wanted.key] = replace(plan_cell(wanted, machine), added=True)
        baseline = by_key[wanted.key]
        if baseline.reasons:
            continue  # the table says that there is no baseline
        present = complete.setdefault(baseline.cell_id, baseline)
        complete[present.cell_id] = replace(present, baseline_id=present.cell_id)
        if entry.cell_id != present.cell_id:
            complete[entry.cell_id] = replace(entry, baseline_id=present.cell_id)
    return complete
