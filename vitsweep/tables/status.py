"""The status of a cell over all its runs, and which runs count."""

from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.formatting import count

DISQUALIFYING = (Status.wrong, Status.diverged)
"""The throughput of a cell whose results are wrong does not count."""


def in_order(runs: DataFrame) -> DataFrame:
    """Return the runs oldest first, by `started_at` where it is known, else as they were given."""
    if "started_at" not in runs:
        return runs
    return runs.sort_values("started_at", kind="stable", na_position="first")


def final_status(runs: DataFrame) -> DataFrame:
    """Return one row per cell: `cell_id, status, reason, failed_rank, attempt`.

    A cell is `measured` when it has a measured run and its latest run did not end `wrong` or
    `diverged`; otherwise it has the status of its latest run. So a run that is killed in the fourth
    block does not discard three good blocks, and a technique that was `wrong` and then repaired is
    measured again as soon as a newer run is.
    """
    ordered = in_order(runs)
    latest = ordered.groupby("cell_id", sort=False, observed=True).tail(1).set_index("cell_id")
    measured = ordered[ordered["status"] == Status.measured]
    good = measured.groupby("cell_id", sort=False, observed=True).tail(1).set_index("cell_id")
    stands = good.index.difference(latest.index[latest["status"].isin(DISQUALIFYING)])
    columns = [c for c in ("status", "reason", "failed_rank", "attempt") if c in runs]
    rows = latest[columns].copy()
    rows.loc[stands] = good.loc[stands, columns]
    return rows.reset_index()


def counted(runs: DataFrame) -> DataFrame:
    """Return the runs whose numbers count: measured, of cells whose status is `measured`.

    Where a cell was measured on several kinds of device, only the latest one counts: a median over
    two machines describes neither.
    """
    status = final_status(runs).set_index("cell_id")["status"]
    ended_well = runs["cell_id"].map(status) == Status.measured
    good = runs[ended_well & (runs["status"] == Status.measured)]
    if "device" not in good:
        return good
    latest = in_order(good).groupby("cell_id", observed=True)["device"].last()
    elsewhere = good["device"].notna() & (good["device"] != good["cell_id"].map(latest))
    return good[~elsewhere]


def note_on_medians(runs: DataFrame, where: str) -> str:
    """Return a warning where throughputs are a batch over the median step; else the empty text.

    Parquet files of record schema 2 do not hold the raw step times, so that their rows keep the median
    (`throughput_from=median`), while newer runs have images over elapsed time. A median leaves stalls out, so
    a ratio between the two kinds differs from 1 without any change in the code.

    Args:
        runs: one row per run.
        where: what the runs are called in the sentence, such as `the kept baseline`.
    """
    if "throughput_from" not in runs or runs.empty:
        return ""
    good = counted(runs)
    medians = int((good["throughput_from"] == "median").sum())
    if not medians:
        return ""
    return (
        f"{medians} of {count(len(good), 'run')} of {where} have the throughput of the median step (schema 2 "
        "without raw step times), not images over elapsed time: stalls are missing in it, so it is too high "
        "where steps are uneven. Measure them anew for a comparison of like with like."
    )
