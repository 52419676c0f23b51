"""`vitsweep check`: the choices of a configuration folder of the user's."""

from collections import Counter
from collections.abc import Sequence

from vitsweep.api.conf_check import check_conf
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.console import open_console
from vitsweep.errors import ExitCode
from vitsweep.tables.formatting import count

HELP = """\
Test every choice of a folder that `--config-dir` adds: each composes, a technique, model or data set equals
plain training on 1 and 2 ranks, and what it refuses is said in sentences. Nothing is kept.

  python -m vitsweep check my_conf
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("folder", metavar="FOLDER", help="with one folder per group, as conf/ has")


def run(arguments: Sequence[str]) -> int:
    """Show what was found; return 0 if nothing is wrong, else 3."""
    typed = VERBS["check"].read(arguments)
    console, results = open_console(), Counter[str]()
    for found in check_conf(typed.folder, console):
        console.print(str(found), soft_wrap=True)
        results[found.result] += 1
    counted = ", ".join(f"{number} {result}" for result, number in results.items())
    console.print(f"{count(results.total(), 'test')}: {counted}.")
    return ExitCode.not_all_measured if results["WRONG"] else ExitCode.ok
