"""`vitsweep report`: tables, charts and one HTML page of a sweep."""

from collections.abc import Sequence

from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["report"])
    options.add_sweep()
    return options


def run(arguments: Sequence[str]) -> int:
    """Write the report and print its path; return 0."""
    from vitsweep.results.find import find_sweep

    store = find_sweep(parser().parse_args(arguments).sweep)
    from vitsweep.report.html import write_report  # pandas and charts, once there is a sweep
    from vitsweep.report.views import collect

    collect(store)
    print(write_report(store))
    return 0
