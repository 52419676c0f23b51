"""`vitsweep export`: a cell of a sweep as one file of plain PyTorch, proved equal to it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.cli import VERBS, Options, require_writable
from vitsweep.errors import BadValueError, ExitCode, ImpossibleCellError, VitsweepError
from vitsweep.execution.run_request import read_cell
from vitsweep.extras.take_home.refusals import refusals
from vitsweep.results.sweeps import find_sweep
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import part_from_tree
from vitsweep.spec.menu import content_of
from vitsweep.tables.names import cell_names, cells_named, find_cell
from vitsweep.tables.render import ranked
from vitsweep.tables.sweep_tables import SweepTables

if TYPE_CHECKING:
    from pandas import DataFrame


HELP = """\
Write a cell as one file of plain PyTorch that trains as it does, and prove that it does.

The file needs torch alone (and timm, transformers or your package, where the model is theirs). It is
started with the cell from equal weights and batches, on a small twin and in its own size; losses,
gradients and weights are compared. What was found stands in its header.

  python -m vitsweep export first --cell best --to train.py
  python -m vitsweep export first --cell O2 fsdp --to train.py
  python -m vitsweep export first --cell best sharding=ddp --to train.py --no-prove
"""
BEST = "best"


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "--cell",
        nargs="+",
        required=True,
        metavar="CELL",
        help="as in `explain`: `O2`, `precision=O2 sharding=fsdp`, an id; `best`, alone or of those",
    )
    options.add_argument("--to", required=True, type=Path, metavar="FILE", help="file to write")
    options.flag("--no-prove", help="write the file, and start nothing")


def run(arguments: Sequence[str]) -> int:
    """Write and prove; return 0, or 1 where the file is not equal to the cell.

    Raises:
        VitsweepError: there is no such cell, it is no plain PyTorch, or the file exists.
    """
    typed = VERBS["export"].read(arguments)
    _check(typed)
    store = find_sweep(typed.sweep)
    print(
        f"Reading the cells of {store.name}.", flush=True
    )  # torch is imported, which takes seconds
    from vitsweep.extras.take_home.prove import are_equal, header, not_provable, prove
    from vitsweep.extras.take_home.write import written

    cells = SweepTables.of(store).cells
    words = " ".join(typed.cell).split()
    row = chosen(cells.assign(cell=cell_names(cells)), words)
    asked = read_cell(store, str(row["cell_id"]))
    cell = timed_steps_of(asked)
    unproved = (
        "Not proved: it was written with `--no-prove`." if typed.no_prove else not_provable(cell)
    )

    def text(proof: Any) -> str:
        return written(cell, typed.to.name, header(store, row, cell, proof))

    try:
        first = text(unproved or "Not proved: `vitsweep export` did not come to its end.")
    except ImpossibleCellError as error:
        reasons = [*error.reasons]
        for _, other in _measured(cells, words).iterrows() if BEST in words else ():
            if not refusals(timed_steps_of(read_cell(store, str(other["cell_id"])))):
                reasons.append(
                    f"The fastest cell that can be written is `--cell {other['cell_id']}`."
                )
                break
        raise VitsweepError("\n".join(reasons)) from error
    if cell is not asked:
        print(
            "Written is the timed step: without schedule, augmentation and evaluations of the training."
        )
    typed.to.write_text(first, encoding="utf-8")
    print(
        f"Wrote cell {row['cell_id']} to {typed.to} ({len(first.splitlines())} lines).", flush=True
    )
    if unproved:
        print(unproved)
        return ExitCode.ok
    found = prove(cell, lambda line: print(f"  {line}", flush=True))
    typed.to.write_text(text(found), encoding="utf-8")
    if are_equal(found):
        return ExitCode.ok
    print(f"{typed.to} does not train as the cell does: use `vitsweep.apply`.", file=sys.stderr)
    return ExitCode.gate_failed


def timed_steps_of(cell: CellSpec) -> CellSpec:
    """Return a cell of `task=train` as its steps are timed, without the training after them."""
    if not cell.task.epochs:
        return cell
    plain = {"task": "measure", "recipe": "none"}
    tree = {g: {**content_of(g, choice), "name": choice} for g, choice in plain.items()}
    return replace(cell, **{group: part_from_tree(tree, group) for group in tree})


def _check(typed: Any) -> None:
    require_writable("--to", typed.to)
    if typed.to.exists():
        raise BadValueError(f"`--to {typed.to}` exists: choose another name, or remove it.")
    if typed.to.suffix != ".py":
        raise BadValueError(f"`--to {typed.to}` must end in `.py`.")


def chosen(cells: "DataFrame", words: Sequence[str]) -> "dict[Any, Any]":
    """Return the row of the cell that words name.

    Raises:
        BadValueError: none does, or several.
    """
    if BEST in words:
        found = _measured(cells, words)
        if found.empty:
            raise BadValueError(
                f"`--cell {' '.join(words)}`: no such cell of the sweep was measured."
            )
    else:
        found = cells[cells["cell_id"].map(str) == find_cell(cells, " ".join(words))]
    row: dict[Any, Any] = found.iloc[0].to_dict()
    return row


def _measured(cells: "DataFrame", words: Sequence[str]) -> "DataFrame":
    """Return the measured cells that words but `best` may mean, the fastest first."""
    named = cells.assign(cell=cell_names(cells))
    found = cells_named(named, " ".join(word for word in words if word != BEST))
    found = found[found["speedup"].notna() | found["images_per_second"].notna()]
    return ranked(found) if len(found) else found
