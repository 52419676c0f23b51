"""`vitsweep check`: the choices of a configuration folder of the user's."""

from collections.abc import Sequence

from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS
from vitsweep.errors import ExitCode

HELP = """\
Test every choice of a folder that `--config-dir` adds: each composes, a technique, model or data set equals
plain training on 1 and 2 ranks, and what it refuses is said in sentences. Nothing is kept.

  python -m vitsweep check my_conf
"""


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["check"], HELP)
    options.add_argument("folder", metavar="FOLDER", help="with one folder per group, as conf/ has")
    return options


def run(arguments: Sequence[str]) -> int:
    """Show what was found; return 0 if nothing is wrong, else 3."""
    typed = parser().parse_args(list(arguments))
    from pandas import DataFrame

    from vitsweep.api.conf_check import check_conf
    from vitsweep.console import open_console
    from vitsweep.tables.terminal import as_table

    console = open_console()
    found = check_conf(typed.folder, console)
    rows = [(f.choice, f.test, "WRONG" if f.fault else "fine", f.note) for f in found]
    console.print(as_table(DataFrame(rows, columns=["choice", "test", "result", "note"])))
    faults = [f"{f.choice}: {f.test}: {f.fault}" for f in found if f.fault]
    for fault in faults:
        console.print(fault, highlight=False, markup=False, soft_wrap=True)
    return ExitCode.not_all_measured if faults else ExitCode.ok
