"""`vitsweep gate`: a check for continuous integration against a kept baseline."""

from collections.abc import Sequence
from pathlib import Path

from vitsweep.cli.verbs import VERBS, Options
from vitsweep.errors import VitsweepError

HELP = """\
Compare every cell of a sweep with a kept baseline; for continuous integration.

Ends with 1 if the 95 % interval of a cell lies wholly beyond the tolerance, if a cell that was
measured no longer is (in some blocks, or in the sweep at all), if its accuracy fell, or if there are
too few runs to tell; with 0 otherwise; with 2 if the two cannot be compared. Speedups are compared
within blocks: over 20 equal cells fewer than 5 % of gates fail by chance.

KEPT is a sweep (its name or folder) or a runs.parquet. To keep a baseline, copy the one of a sweep:

  cp results/vit_nano-precision/runs.parquet benchmarks/kept.parquet
  python -m vitsweep gate vit_nano-precision --against benchmarks/kept.parquet --metric speedup,peak_gib
"""


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["gate"], HELP)
    options.add_sweep()
    options.add_argument(
        "--against", required=True, metavar="KEPT", help="sweep or runs.parquet of the baseline"
    )
    options.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="how much worse is accepted (%(default)s)",
    )
    options.add_argument(
        "--metric",
        action="append",
        metavar="NAME,...",
        help="columns such as speedup, step_time_ms or peak_gib (speedup)",
    )
    options.add_argument(
        "--mixed-hardware",
        action="store_true",
        help="compare cells although they ran on different devices",
    )
    options.add_argument(
        "--lenient",
        action="store_true",
        help="only warn of cells that are gone, too few runs, lost blocks and a lower accuracy",
    )
    return options


def run(arguments: Sequence[str]) -> int:
    """Compare a sweep with a kept baseline.

    Returns:
        1 where a cell became worse beyond noise and tolerance, else 0.

    Raises:
        VitsweepError: there is no such sweep or baseline, or nothing could be compared.
    """
    from vitsweep.report.gate import gate
    from vitsweep.results.store import find_sweep
    from vitsweep.tables.load import load

    options = parser().parse_args(list(arguments))
    names = [name.strip() for text in options.metric or [] for name in text.split(",")]
    store, kept = find_sweep(options.sweep), Path(options.against)
    if kept.suffix == ".parquet" and not kept.is_file():
        raise VitsweepError(
            f"There is no kept baseline `{kept}`. Keep one: `cp {store.root}/runs.parquet {kept}`."
        )
    verdict = gate(
        load(store, rows="runs"),
        load(kept if kept.is_file() else find_sweep(options.against), rows="runs"),
        tolerance=options.tolerance,
        metrics=names,
        baselines=store.baselines(),
        mixed_hardware=options.mixed_hardware,
        lenient=options.lenient,
    )
    print("\n".join(verdict.sentences))
    if not verdict.num_compared:
        raise VitsweepError(
            f"Nothing could be compared, so the gate says nothing about `{options.sweep}`."
        )
    print(verdict.verdict)
    return 0 if verdict.passed else 1
