"""`vitsweep report`: tables, charts and one HTML page of a sweep; what changed between two."""

from collections.abc import Sequence

from vitsweep.api.sweep import load
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.console import open_console
from vitsweep.errors import BadValueError
from vitsweep.extras import option
from vitsweep.tables.render import TextTable


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "other",
        nargs="?",
        metavar="OTHER",
        help="the same cells measured on another day or machine: show which speedups changed",
    )
    options.flag("--latex", help="write the table and a paragraph of method as LaTeX instead")


def run(arguments: Sequence[str]) -> int:
    """Write the report of the sweep, what changed from it to the other, or LaTeX; print the paths."""
    asked = VERBS["report"].read(arguments)
    if asked.latex and asked.other:
        raise BadValueError("`--latex` is of one sweep: leave out the second one.")
    sweep = load(asked.sweep)
    if asked.latex:
        print(*option("report --latex")(sweep.folder), sep="\n")
        return 0
    if not asked.other:
        print(sweep.report())
        return 0
    said, table, folder = option("report SWEEP OTHER")(sweep.folder, load(asked.other).folder)
    open_console().print(TextTable(table))
    print(said, f"{folder / 'changes.csv'}", f"{folder / 'changes.md'}", sep="\n")
    return 0
