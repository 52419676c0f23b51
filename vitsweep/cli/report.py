"""`vitsweep report`: tables, charts and one HTML page of a sweep, or of two compared."""

from collections.abc import Sequence

from vitsweep.api.sweep import load
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.extras import of_two


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "other",
        nargs="?",
        metavar="OTHER",
        help="the same cells measured on another day or machine: show which speedups changed",
    )


def run(arguments: Sequence[str]) -> int:
    """Write the report of the sweep, or what changed from it to the other; print its path."""
    asked = VERBS["report"].read(arguments)
    sweep = load(asked.sweep)
    if not asked.other:
        print(sweep.report())
        return 0
    other = load(asked.other)
    print(of_two("page")(sweep.folder, other.folder))
    return 0
