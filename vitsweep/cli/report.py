"""`vitsweep report`: tables, charts and one HTML page of a sweep."""

from collections.abc import Sequence

from vitsweep import extras
from vitsweep.api.sweep import load
from vitsweep.cli import VERBS, Options


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    if "report --latex" in extras.OPTIONS:
        options.flag("--latex", help="write the table and a paragraph of method as LaTeX instead")


def run(arguments: Sequence[str]) -> int:
    """Write the report of the sweep, or LaTeX; print the paths."""
    asked = VERBS["report"].read(arguments)
    sweep = load(asked.sweep)
    wants_latex = getattr(asked, "latex", False)
    paths = extras.option("report --latex")(sweep.folder) if wants_latex else [sweep.report()]
    print(*paths, sep="\n")
    return 0
