"""What was typed after `vitsweep retry`."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitsweep.cli.options import Options
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status

RETRIED = tuple(str(s) for s in Status if s not in (Status.measured, Status.invalid))
HELP = """\
Run cells of a sweep again that ended otherwise, whichever command asked for them.

An override makes new cells of them:

  python -m vitsweep retry default --status out_of_memory --set memory=recompute_blocks
"""


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """Cells to run again, as they were asked for.

    Attributes:
        sweep: name under `results/` or folder.
        statuses: how the cells ended.
        overrides: what is to be different this time.
    """

    sweep: str
    statuses: tuple[str, ...]
    overrides: tuple[str, ...]


def retry_options(arguments: Sequence[str]) -> RetryOptions:
    """Read a command line.

    Raises:
        VitsweepError: an option or a status is unknown, or several sweeps are named.
    """
    parser = retry_parser()
    found = parser.parse_intermixed_args(list(arguments))
    words = [*found.words, *found.set]
    sweeps = [word for word in words if "=" not in word]
    if len(sweeps) > 1:
        parser.error(f"one sweep at a time, not {' and '.join(f'`{name}`' for name in sweeps)}")
    return RetryOptions(
        sweep=sweeps[0] if sweeps else "default",
        statuses=RETRIED if found.status is None else _statuses(found.status),
        overrides=tuple(word for word in words if "=" in word),
    )


def retry_parser() -> Options:
    """Return the parser, which also tells the shell what may follow."""
    usage = "python -m vitsweep retry [SWEEP] [--status a,b] [--set override ...]"
    parser = Options("retry", HELP, usage=usage)
    parser.add_argument(
        "words", nargs="*", metavar="SWEEP", help="name under results/ or folder (default)"
    )
    parser.add_argument(
        "--status",
        metavar="a,b",
        help="how the cells ended, such as failed or timed_out (all but measured and invalid)",
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="override",
        help="what is to be different this time",
    )
    return parser


def _statuses(text: str) -> tuple[str, ...]:
    wanted = tuple(word for word in text.split(",") if word)
    if not wanted or not set(wanted) <= set(RETRIED):
        raise VitsweepError(f"`--status {text}`: name some of {', '.join(RETRIED)}.")
    return wanted
