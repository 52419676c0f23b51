"""The roofline of one cell (`vitsweep explain A`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.tables.formatting import Column, number, percent, plain_rows, text_columns, values
from vitsweep.tables.roofline import COLUMNS, roofline, roofs
from vitsweep.tables.sentences import say


@dataclass(frozen=True, eq=False)
class CellRoofline:
    """The phases of one cell on the roofline.

    Attributes:
        name: of the cell.
        causes: its rows of `roofline`.
    """

    name: str
    causes: DataFrame
    names: ClassVar[tuple[str, ...]] = ()
    """Columns of `texts` are named after no cell."""

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        known = self.causes.dropna(subset=["share_of_attainable"])
        parts = [
            f"{percent(row['share_of_attainable'])} in {row['phase']}"
            for _, row in known.iterrows()
        ]
        return say("roofline", name=self.name, phases=", ".join(parts)) if parts else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the limits are from."""
        return (roofs(self.causes),)

    def texts(self, operators: int = 0) -> dict[str, DataFrame]:
        """Return the table that the terminal shows."""
        columns: dict[str, Column] = {
            "phase": values("phase"),
            "ms": values("time_ms", number),
            "GFLOP": values("flops", lambda flops: number(flops / 1e9)),
            "MB, at least": values("bytes_at_least", lambda moved: number(moved / 1e6)),
            "TFLOP/s": values("tflops_per_rank", number),
            "attainable, at most": values("attainable_tflops", number),
            "share, at least": values("share_of_attainable", percent),
        }
        return {"Roofline": text_columns(self.causes, columns)}

    def json(self) -> dict[str, Any]:
        """Return it as plain values for `--json`."""
        return {"a": self.name, "phases": plain_rows(self.causes[[*COLUMNS]])}


def cell_roofline(cells: DataFrame, cell_id: str, name: str) -> CellRoofline:
    """Return the phases of one cell on the roofline.

    Raises:
        VitsweepError: its phases or FLOPs were not measured.
    """
    points = roofline(cells)
    points = points[points["cell_id"] == cell_id]
    if points.empty:
        raise VitsweepError(f"No phase of {name} was measured with its FLOPs: it has no roofline.")
    return CellRoofline(name, points)
