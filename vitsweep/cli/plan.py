"""`vitsweep plan`: what a sweep would run. Nothing is trained."""

from collections.abc import Sequence

from vitsweep.cli.hydra_entry import run_hydra
from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser; overrides themselves are read by Hydra."""
    options = Options(VERBS["plan"])
    options.add_argument(
        "-m", "--multirun", action="store_true", help="as in the sweep; always implied"
    )
    options.add_argument(
        "overrides",
        nargs="*",
        metavar="override",
        help="as for the sweep: `python -m vitsweep --help` lists the choices",
    )
    return options


def run(arguments: Sequence[str]) -> int:
    """List the cells; return 0."""
    if {"-h", "--help"} & set(arguments):
        parser().print_help()
        return 0
    overrides = [a for a in arguments if a not in ("-m", "--multirun")]
    return run_hydra(["--multirun", *overrides, "hydra.sweeper.plan_only=true"])
