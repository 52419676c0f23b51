"""`vitsweep plan`: what a sweep would run, need and take. Nothing is trained."""

from collections.abc import Sequence
from math import inf
from pathlib import Path

from vitsweep.api.session import NotOursError
from vitsweep.cli import VERBS, Options, print_json, require_writable
from vitsweep.cli.cells import read_line
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.rates.profile import profile_named


def add_options(options: Options) -> None:
    """Add what may follow the verb; overrides themselves are read by Hydra."""
    _add_own(options)
    options.add_argument(
        "overrides",
        nargs="*",
        metavar="override",
        help="as for the sweep: `python -m vitsweep show GROUP` lists the choices",
    )


def run(arguments: Sequence[str]) -> int:
    """List the cells; return 0, or 2 where every cell is invalid.

    Raises:
        BadValueError: an option has a wrong value.
    """
    if {"-h", "--help"} & set(arguments):
        VERBS["plan"].parser().print_help()
        return 0
    options = Options(VERBS["plan"])
    _add_own(options)
    known, words = options.parse_known_args(list(arguments))
    if known.parquet:
        require_writable("--parquet", known.parquet)
    line = read_line(["--multirun", *words], options._option_string_actions)
    if line.of_hydra.startswith("-"):
        options.error(f"unrecognized arguments: {line.of_hydra}")
    from vitsweep.api.plan import machine_with, plan

    hardware = _parts(known.hardware)
    nodes = [machine_with(profile_named(name)) for name in hardware]
    # sizes are those of the least memory, so that all plans have the same
    smallest = min(nodes, key=lambda node: node.least_gib or inf, default=None)
    try:
        session = line.session(smallest)
    except NotOursError as error:
        raise BadValueError(
            f"`plan` needs a launcher of vitsweep, such as `hydra/launcher=local`; not `{error.choice}`."
        ) from error
    predict = not known.no_predict
    rows = plan(session, predict=predict, hardware=hardware, parquet=known.parquet)
    if known.json:
        print_json(sweep=session.settings.name, cells=rows)
    return ExitCode.bad_input if all(row["state"] == "invalid" for row in rows) else ExitCode.ok


def _add_own(options: Options) -> None:
    options.flag("-m", "--multirun", help="as in the sweep; always implied")
    options.add_argument(
        "--hardware", metavar="A,B", help="plan for nodes of these GPUs, or profile files"
    )
    options.add_argument("--parquet", type=Path, metavar="FILE", help="write all columns to it")
    options.flag("--no-predict", help="states only, without memory and step time")
    options.add_json()


def _parts(text: str | None) -> tuple[str, ...]:
    """Return the parts of a list, each once."""
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part))
