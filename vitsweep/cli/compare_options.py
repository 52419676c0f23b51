"""What was typed after `vitsweep compare`."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vitsweep.cli.options import Options
from vitsweep.errors import VitsweepError

DEFAULT_WIDTH, DEFAULT_MINUTES = 0.05, 30.0
FOLDER = "sweep.name=compare"
"""Where the runs go unless the user says otherwise: blocks of two, apart from ordinary sweeps."""

HELP = """\
Measure two settings in turns and say how their throughputs compare, with a 95 % interval.

A and B are overrides as anywhere in vitsweep; several of them, or none, are quoted as one word. What
follows holds for both. The runs go into results/compare (or `sweep.name=NAME`); Ctrl-C loses nothing
and the same command continues.

  python -m vitsweep compare precision=O1 precision=fp32 sharding=ddp batch.images_per_step=128
  python -m vitsweep compare "sharding=fsdp memory=recompute_blocks" "" --width 0.02 --minutes 60
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """A comparison as it was asked for.

    Attributes:
        variant: overrides of A.
        baseline: overrides of B, which the ratio divides by.
        common: overrides of both.
        width: half of the interval that is narrow enough, relative: 0.05 is +- 5 %.
        minutes: budget of this command.
        mixed_hardware: whether blocks of different devices may be taken together.
    """

    variant: tuple[str, ...]
    baseline: tuple[str, ...]
    common: tuple[str, ...]
    width: float = DEFAULT_WIDTH
    minutes: float = DEFAULT_MINUTES
    mixed_hardware: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """A and B in words."""
        variant, baseline = (" ".join(s) or "the default" for s in (self.variant, self.baseline))
        return variant, baseline


def compare_options(arguments: Sequence[str]) -> CompareOptions:
    """Read a command line.

    Raises:
        VitsweepError: there are not two settings, an option is unknown or has a wrong value.
    """
    parser = compare_parser()
    found = parser.parse_intermixed_args([word for word in arguments if word != "--"])
    for option in ("width", "minutes"):
        value = getattr(found, option)
        if not 0 < value < math.inf:
            raise VitsweepError(
                f"`--{option} {value:g}` must be a number above 0, like "
                f"{DEFAULT_WIDTH if option == 'width' else DEFAULT_MINUTES:g}."
            )
    if len(found.settings) < 2:
        raise VitsweepError(
            "`compare` needs two settings, A and B; an empty one (`''`) is the default.\n"
            + parser.format_usage().strip()
        )
    variant, baseline, *common = found.settings
    return CompareOptions(
        variant=_overrides(variant),
        baseline=_overrides(baseline),
        common=tuple(common),
        width=found.width,
        minutes=found.minutes,
        mixed_hardware=found.mixed_hardware,
    )


def _overrides(setting: str) -> tuple[str, ...]:
    return tuple(shlex.split(setting)) if " " in setting.strip() else tuple(setting.split())


def compare_parser() -> Options:
    """Return the parser, which also tells the shell what may follow."""
    parser = Options(
        "compare", HELP, usage="python -m vitsweep compare A B [override ...] [options]"
    )
    parser.add_argument("settings", nargs="*", metavar="A B [override ...]", help="see above")
    parser.add_argument(
        "--width",
        type=float,
        default=DEFAULT_WIDTH,
        help="stop when the interval is +- this, relative (default %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        help="start no block that would end later than this (default %(default)g); the first always runs",
    )
    parser.add_argument(
        "--mixed-hardware",
        action="store_true",
        help="take blocks of different devices together",
    )
    return parser
