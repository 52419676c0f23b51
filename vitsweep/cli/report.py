"""`vitsweep report`: tables, charts and one HTML page of a sweep, or of two compared."""

import sys
from collections.abc import Sequence

from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["report"])
    options.add_sweep()
    options.add_argument(
        "other",
        nargs="?",
        metavar="OTHER",
        help="the same cells measured on another day or machine: show which speedups changed",
    )
    return options


def run(arguments: Sequence[str]) -> int:
    """Write the report of the sweep, or what changed from it to the other; print its path."""
    from vitsweep.results.find import find_sweep

    asked = parser().parse_args(arguments)
    store = find_sweep(asked.sweep)
    other = find_sweep(asked.other) if asked.other else None
    from vitsweep.report.html import write_report  # pandas and charts, once there is a sweep
    from vitsweep.report.two_sweeps import notes_on_sides, write_comparison_report
    from vitsweep.report.views import collect
    from vitsweep.tables.load import runs_of

    if other:
        page = write_comparison_report(store, other)
        for note in notes_on_sides({"A": runs_of(store), "B": runs_of(other)}):
            print(f"Warning: {note}", file=sys.stderr)
        print(page)
        return 0
    collect(store)
    print(write_report(store))
    return 0
