"""`vitsweep gate`: a check for continuous integration against a kept baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitsweep.cli import VERBS, Options, print_json, rows_of
from vitsweep.errors import ExitCode, VitsweepError
from vitsweep.extras.gate.gate import gate
from vitsweep.report.answer import answers
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.load import load
from vitsweep.tables.names import find_cell
from vitsweep.tables.sweep_tables import SweepTables

if TYPE_CHECKING:
    from pandas import DataFrame

HELP = """\
Compare every cell of a sweep with a kept baseline; for continuous integration.

Ends with 1 if the 95 % interval of a cell lies wholly beyond the tolerance, if a cell that was
measured no longer is (in some blocks, or in the sweep at all), if its accuracy fell, or if there are
too few runs to tell; with 4 if a cell is worse, but whether beyond the tolerance is not shown, or if
noise would hide a loss of half; with 0 otherwise; with 2 if the two cannot be compared. Speedups are
compared within blocks, and baselines by images per second: over 20 equal cells fewer than 5 % of gates
fail by chance, where days are equally fast.

KEPT is a sweep (its name or folder) or a runs.parquet. To keep a baseline, copy the one of a sweep, and
measure again in a sweep of another name; kept runs that stand in the sweep too do not count as new:

  cp results/vit_nano-precision/runs.parquet benchmarks/kept.parquet
  python -m vitsweep -m precision=O1,O2 sweep.name=today
  python -m vitsweep gate today --against benchmarks/kept.parquet --metric speedup,peak_gib
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "--against", required=True, metavar="KEPT", help="sweep or runs.parquet of the baseline"
    )
    options.number(
        "--tolerance", 0.05, "how much worse is accepted (%(default)s)", 0, 0.99, metavar="SHARE"
    )
    options.add_argument(
        "--metric",
        action="append",
        metavar="NAME,...",
        help="columns such as speedup, step_time_ms or peak_gib (speedup)",
    )
    options.add_argument(
        "--cell",
        action="append",
        metavar="CELL",
        help="a short name, settings or id; only it and its baseline are compared (all cells)",
    )
    options.flag("--mixed-hardware", help="compare cells although they ran on different devices")
    options.flag(
        "--lenient",
        help="fail only for intervals beyond the tolerance, and warn of cells that are gone or no longer "
        "measured, too few runs, missing blocks, a lower accuracy, a slower baseline, and what is undecided",
    )
    options.add_json()


def run(arguments: Sequence[str]) -> int:
    """Compare a sweep with a kept baseline.

    Returns:
        1 where a cell became worse beyond noise and tolerance, 4 where that is undecided, else 0.

    Raises:
        VitsweepError: there is no such sweep or baseline, or nothing could be compared.
    """
    options = VERBS["gate"].read(arguments)
    names = [name.strip() for text in options.metric or [] for name in text.split(",")]
    store, kept = find_sweep(options.sweep), Path(options.against)
    if kept.suffix == ".parquet" and not kept.is_file():
        raise VitsweepError(
            f"There is no kept baseline `{kept}`. Keep one: `cp {store.root}/runs.parquet {kept}`."
        )
    if kept.name.endswith(".tar.gz"):
        raise VitsweepError(
            f"`--against {kept}` is a bundle: `tar xf {kept}`, and name the folder that it makes."
        )
    kept_runs = load(kept if kept.is_file() else find_sweep(options.against), rows="runs")
    new_runs = _new_runs(load(store, rows="runs"), kept_runs, store.root.name)
    if options.cell:
        cells = SweepTables.of(store).cells
        wanted = {find_cell(cells, name) for name in options.cell}
        wanted |= {base for cell, base in store.baselines().items() if base and cell in wanted}
        new_runs, kept_runs = (r[r["cell_id"].isin(wanted)] for r in (new_runs, kept_runs))
    verdict = gate(
        new_runs,
        kept_runs,
        tolerance=options.tolerance,
        metrics=names,
        baselines=store.baselines(),
        mixed_hardware=options.mixed_hardware,
        lenient=options.lenient,
    )
    print("\n".join(verdict.sentences))
    if not verdict.num_compared:
        raise VitsweepError(
            f"Nothing of `{options.sweep}` could be compared: measure cells of `--against` in it."
        )
    print("\n".join([*answers(SweepTables.of(store)), verdict.verdict]))
    if options.json:
        word = "undecided" if verdict.undecided else "passed" if verdict.passed else "failed"
        print_json(gate=word, sentences=verdict.sentences, cells=rows_of(verdict.rows))
    if verdict.undecided:
        print(_measure_again(kept_runs, verdict.blocks_to_decide))
        return ExitCode.gate_undecided
    return ExitCode.ok if verdict.passed else ExitCode.gate_failed


def _new_runs(runs: "DataFrame", kept: "DataFrame", sweep: str) -> "DataFrame":
    """Return the runs that are not among the kept ones: nothing is compared with itself.

    Raises:
        VitsweepError: there is none.
    """
    key = ["sweep", "cell_id", "run_id"]
    if runs.empty or not {*key} <= {*runs} & {*kept}:
        return runs
    is_kept = runs.set_index(key).index.isin(kept.set_index(key).index)
    if is_kept.all():
        raise VitsweepError(
            f"All {len(runs)} runs of `{sweep}` are runs of the kept baseline: measure again in a sweep of "
            "its own, such as with `sweep.name=today`."
        )
    if is_kept.any():
        print(f"{is_kept.sum()} of {len(runs)} runs are those of the kept baseline and left out.")
    return runs[~is_kept]


def _measure_again(kept: "DataFrame", blocks: int) -> str:
    """Say how undecided cells are measured again on both sides, in a number of blocks fixed beforehand."""
    commits = kept["git_commit"].dropna().unique() if "git_commit" in kept else ()
    at = f" ({', '.join(map(str, commits))})" if len(commits) else ""
    return (
        "More blocks in addition to the kept ones decide little. Measure both sides again with "
        f"`measurement.blocks={blocks} sweep.name=NAME`, in fresh blocks and no more: one with the kept "
        f"code{at}, one with the code of now; then compare those."
    )
