"""What is missing or failed, and why."""

from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import missing, plain
from vitsweep.tables.names import cell_names
from vitsweep.tables.show import MANY


def coverage(cells: DataFrame) -> DataFrame:
    """Return one row per cell without a measurement: what varies, status, reason, rank, cell id.

    A cell that was asked for and never ran has the status `not run`.
    """
    absent = cells.assign(cell=cell_names(cells))[cells["status"] != Status.measured]
    named = varying(cells)
    named = ["cell"] if len(named) > MANY else named
    columns = [*named, "status", "reason", "failed_rank", "attempt", "cell_id"]
    return (
        absent.assign(status=[plain(s) or "not run" for s in absent["status"]])
        .reindex(columns=columns)
        .assign(reason=lambda t: t["reason"].map(plain).astype(str))
        .sort_values("status", kind="stable")
    )


def counts(cells: DataFrame) -> DataFrame:
    """Return how many cells ended in which way: `status, num_cells`, measured first."""
    status = cells["status"].map(lambda s: "not run" if missing(s) else str(s))
    tally = status.value_counts().rename_axis("status").rename("num_cells").reset_index()
    return tally.sort_values("status", key=lambda s: s != Status.measured, kind="stable")
