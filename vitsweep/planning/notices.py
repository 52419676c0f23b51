"""What a command says about its cells and the records it found, before anything runs."""

from collections.abc import Collection, Mapping

from rich.console import Console

from vitsweep.execution.code_hash import changed_files
from vitsweep.planning.pending import ResumeState
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.planning.usable_runs import UNKNOWN_CODE
from vitsweep.results.store import Store

MOST_FILES = 4
"""More changed files than this are counted, not named."""


def print_notices(
    state: ResumeState, plan: SweepPlan, store: Store, how_to_repeat: str, console: Console
) -> None:
    """Say which cells are measured anew and why, which are used as they are, and which not repeated.

    And what of their tasks is probably not meant.

    Args:
        state: of the cells.
        plan: the cells of the command.
        store: names the files of earlier states of the code.
        how_to_repeat: what measures again the cells that are not repeated.
        console: where it is said.
    """
    for line in _lines(state, plan, store, how_to_repeat):
        console.print(
            line, highlight=False, markup=False
        )  # rich reads a list in brackets as a style


def _lines(state: ResumeState, plan: SweepPlan, store: Store, how_to_repeat: str) -> list[str]:
    tasks = [entry.spec.task for entry in plan.entries.values() if not entry.reasons]
    lines = list(dict.fromkeys(line for task in tasks for line in task.doubts()))
    if state.changed_code:
        lines.append(
            f"{_cells(state.changed_code)} measured anew, because code that computes them has "
            f"changed{_where(state.changed_code, plan, store)}. The earlier runs are kept; "
            "`sweep.accept_code=any` uses them where they are complete."
        )
    known = {cell: code for cell, code in state.accepted_code.items() if code != UNKNOWN_CODE}
    if known:
        lines.append(
            f"{_cells(known)} used as measured by other code (`sweep.accept_code=any`)"
            f"{_where(known, plan, store)}."
        )
    if unknown := state.accepted_code.keys() - known.keys():
        lines.append(
            f"{_cells(unknown)} used as measured before records named their code; "
            "`sweep.remeasure=true` measures anew."
        )
    if state.unproved:
        lines.append(
            f"{_cells(state.unproved)} measured again, because the earlier runs lack the proof that "
            "this command wants (`measurement.prove=twin`)."
        )
    if state.not_measured:
        lines.append(
            f"{_cells(state.not_measured)} not measured: the runs ended otherwise and are not repeated; "
            f"{how_to_repeat}."
        )
    return lines


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
