"""What was typed after `vitsweep gate`."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitsweep.cli.options import Options

HELP = """\
Compare every cell of a sweep with a kept baseline; for continuous integration.

Ends with 1 if the 95 % interval of a cell lies wholly beyond the tolerance, or if a cell that was
measured no longer is; with 0 otherwise; with 2 if the two cannot be compared.

KEPT is a sweep (its name or folder) or a runs.parquet. To keep a baseline, copy the one of a sweep:

  cp results/default/runs.parquet benchmarks/kept.parquet
  python -m vitsweep gate default --against benchmarks/kept.parquet --metric speedup,peak_gib
"""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """A gate as it was asked for; see `vitsweep.report.gate.gate`."""

    sweep: str
    against: str
    tolerance: float
    metrics: tuple[str, ...]
    mixed_hardware: bool


def gate_options(arguments: Sequence[str]) -> GateOptions:
    """Read a command line.

    Raises:
        VitsweepError: an option is missing, unknown or no number.
    """
    found = gate_parser().parse_args(list(arguments))
    names = [name.strip() for text in found.metric or ["img/s"] for name in text.split(",")]
    return GateOptions(
        sweep=found.sweep,
        against=found.against,
        tolerance=found.tolerance,
        metrics=tuple(names),
        mixed_hardware=found.mixed_hardware,
    )


def gate_parser() -> Options:
    """Return the parser, which also tells the shell what may follow."""
    parser = Options("gate", HELP)
    parser.add_sweep()
    parser.add_argument(
        "--against", required=True, metavar="KEPT", help="sweep or runs.parquet of the baseline"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="how much worse is accepted (%(default)s)",
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME,...",
        help="columns such as speedup, step_time_ms or peak_gib (img/s)",
    )
    parser.add_argument(
        "--mixed-hardware",
        action="store_true",
        help="compare cells although they ran on different devices",
    )
    return parser
