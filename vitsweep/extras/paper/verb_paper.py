"""`vitsweep paper`: what a paper says of a sweep, as LaTeX."""

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitsweep.cli.verbs import VERBS, Options
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.paper.paper import WIDTHS, write_paper
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.results.sweeps import find_sweep
from vitsweep.spec.free_text import free_text
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.tables.sweep_tables import SweepTables

HELP = """\
Write a sweep for a paper: tables for booktabs, figures as PDF and SVG as wide as a column, a paragraph on
method from what was done, the BibTeX entries of the techniques, compute used, and answers to a
reproducibility checklist. paper.tex shows all of it.

  python -m vitsweep paper first
  python -m vitsweep paper first --venue neurips --price 2.5
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where it is written (SWEEP/paper)"
    )
    options.add_argument(
        "--venue",
        default="icml",
        help="neurips, iclr, icml, cvpr or ieee: the widths of figures (%(default)s)",
    )
    options.add_argument(
        "--price", type=float, help="of a GPU hour, for the cost; without it the cost is empty"
    )
    options.add_argument("--currency", default="USD", help="of the price (%(default)s)")


def run(arguments: Sequence[str]) -> int:
    """Write the files.

    Raises:
        VitsweepError: there is no such sweep, nothing was measured, or an option is wrong.
    """
    typed = VERBS["paper"].read(arguments)
    if typed.venue not in WIDTHS:
        raise BadValueError(f"`--venue {typed.venue}` must be one of {', '.join(WIDTHS)}.")
    if typed.price is not None and not 0 <= typed.price < math.inf:
        raise BadValueError(f"`--price {typed.price:g}` must be a number of at least 0.")
    store = find_sweep(typed.sweep)
    folder = typed.to or store.root / "paper"
    if folder.exists() and not folder.is_dir():
        raise BadValueError(f"`--to {folder}` is a file: name a folder.")
    written, unknown = write_paper(
        SweepTables.of(store),
        folder,
        sorted(set(_cited(store))),
        venue=typed.venue,
        price_per_gpu_hour=typed.price,
        currency=typed.currency,
    )
    print(
        f"Wrote {len(written)} files to {folder}: `pdflatex paper`, `bibtex paper` in it show all."
    )
    if unknown:
        print(
            f"pdfLaTeX has no letter for {', '.join(unknown)}: the text has the code point in its place."
        )
    return ExitCode.ok


def _cited(store: "Store") -> Iterator[str]:
    """Yield what the techniques and models of the cells that ran cite.

    Cells that somebody else froze with free text are not built.
    """
    for cell_id in filter(store.has_runs, store.cell_ids()):
        try:
            document, is_own = store.frozen_by(cell_id)
            if not is_own and [*free_text(document["cell"])]:
                continue
            cell = cell_from_tree(document["cell"])
        except VitsweepError as error:
            text = f"what cell {cell_id} uses is not cited ({error})"
            warnings.warn(text, DamagedRecordWarning, stacklevel=2)
            continue
        yield from cell.model.cites
        for technique in cell.techniques.values():
            yield from technique.references
