"""Roster: the cells of one command, typed and checked, with their baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.machine import Machine
from vitsweep.spec.resolve import resolve
from vitsweep.spec.rules import conflicts
from vitsweep.sweep.asked import Asked, Tree


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell of a command.

    Attributes:
        asked: as the command line asked for it.
        tree: resolved, as it will be frozen.
        cell: the spec built from it.
        reasons: why it cannot run; empty if it can.
        baseline_id: cell its speedup divides by, or None.
        added: True where nobody asked for the cell but a speedup needs it.
    """

    asked: Asked
    tree: Tree
    cell: CellSpec
    reasons: tuple[str, ...]
    baseline_id: str | None = None
    added: bool = False

    @cached_property
    def cell_id(self) -> str:
        """Id of the cell; hashing it takes a tenth of a millisecond, and it is asked for often."""
        return self.cell.cell_id


@dataclass(frozen=True)
class Roster:
    """Entries by cell id: first the cells that were asked for, in their order, then baselines."""

    entries: dict[str, Entry]

    @property
    def runnable(self) -> list[Entry]:
        """Entries that no rule refuses."""
        return [entry for entry in self.entries.values() if not entry.reasons]

    @property
    def baselines(self) -> dict[str, str | None]:
        """Cell -> baseline cell."""
        return {key: entry.baseline_id for key, entry in self.entries.items()}


def make_roster(
    asked: Sequence[Asked], machine: Machine, baseline_of: Callable[[Asked], Asked | None]
) -> Roster:
    """Resolve, type and check all cells, and add the baselines that they need.

    Raises:
        BadValueError: a value is wrong; all wrong values of all cells are named.
    """
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for cell in asked:
        try:
            entry = make_entry(cell, machine)
        except BadValueError as error:
            problems += str(error).splitlines()
            continue
        entries.setdefault(entry.cell_id, entry)
    if problems:
        raise BadValueError("\n".join(dict.fromkeys(problems)))
    return Roster(_with_baselines(entries, machine, baseline_of))


def make_entry(asked: Asked, machine: Machine) -> Entry:
    """Resolve, type and check one cell."""
    tree = resolve(asked.tree, machine)
    cell = cell_from_tree(tree)
    return Entry(asked=asked, tree=tree, cell=cell, reasons=tuple(conflicts(cell)))


def _with_baselines(
    entries: dict[str, Entry], machine: Machine, baseline_of: Callable[[Asked], Asked | None]
) -> dict[str, Entry]:
    complete, by_key = dict(entries), {}
    for entry in entries.values():
        wanted = baseline_of(entry.asked)
        if wanted is None or entry.reasons:
            continue
        if wanted.key not in by_key:
            by_key[wanted.key] = replace(make_entry(wanted, machine), added=True)
        baseline = by_key[wanted.key]
        if baseline.reasons:
            continue  # the table says that there is no baseline
        present = complete.setdefault(baseline.cell_id, baseline)
        complete[present.cell_id] = replace(present, baseline_id=present.cell_id)
        if entry.cell_id != present.cell_id:
            complete[entry.cell_id] = replace(entry, baseline_id=present.cell_id)
    return complete


def sweep_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `sweep` node of a composed configuration."""
    settings: dict[str, Any] = config["sweep"]
    return settings
