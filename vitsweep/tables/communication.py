"""Bytes sent per step, counted at the collectives, beside the formulas of the papers."""

from dataclasses import dataclass

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.names import varying
from vitsweep.tables.valid_runs import checked_cells

PURPOSES = ("parameter_bytes_per_step", "gradient_bytes_per_step", "activation_bytes_per_step")


@dataclass(frozen=True)
class PublishedVolume:
    """A communication volume as its source prints it.

    Attributes:
        formula: as printed; M activation size of one block, N devices.
        per: what the source counts.
        source: where it is printed and how sure the transcription is.
    """

    formula: str
    per: str
    source: str


_DSP = "DSP ICLR'25 submission, Table 3 (SECONDARY: review text)"
_PER_DEVICE = "forward of one spatial + one temporal block, per device; (N-1)/N of it is sent"

PUBLISHED_VOLUMES = {
    "dsp": PublishedVolume("2M/N", _PER_DEVICE, _DSP),
    "ulysses": PublishedVolume("4M/N", _PER_DEVICE, _DSP),
    "megatron_sp": PublishedVolume("8M", _PER_DEVICE, _DSP),
    "ring": PublishedVolume("2M", _PER_DEVICE, _DSP),
}
"""Shown beside what is counted, never asserted.

Two all-to-alls of a local tensor of M/N send (N-1)/N of 2M/N from a device. Two all-gathers and two
reduce-scatters of M in each of two blocks send (N-1)/N of 8M, K and V once round a ring (N-1)/N of
2M: from each device, not in total, as the review text has it of these two.
"""


def communication(cells: DataFrame) -> DataFrame:
    """Return bytes sent per rank and step by purpose, in total and per image, most first.

    Counted values are the mean over ranks. `predicted_...` columns, where the plan made them, are
    each method's exact formula of its own implementation; `published_formula` is the paper's, and
    cannot be compared without `published_unit`.
    """
    cells = checked_cells(
        cells, "sequence_parallel", "world_size", "num_tokens", "images_per_step", *PURPOSES
    )
    counted = [p for p in PURPOSES if p in cells and cells[p].notna().any()]
    formulas = [f"predicted_{p}" for p in PURPOSES if f"predicted_{p}" in cells]
    measured = cells[cells["status"] == Status.measured]
    measured = measured.dropna(subset=counted, how="all") if counted else measured.iloc[:0]
    columns = list(
        dict.fromkeys(
            [*varying(cells), "sequence_parallel", "world_size", "num_tokens", "images_per_step"]
        )
    )
    times = [
        c
        for c in ("communication_ms", "step_time_ms", "blocks", "baseline_cell_id")
        if c in measured
    ]
    total = measured[counted].apply(pd.to_numeric).sum(axis=1, min_count=1)
    return (
        measured[["cell_id", *columns, *counted, *formulas, *times]]
        .assign(
            bytes_per_step=total,
            bytes_per_image=total * measured["world_size"] / measured["images_per_step"],
            published_formula=_published(measured, "formula"),
            published_unit=_published(measured, "per"),
            published_source=_published(measured, "source"),
        )
        .sort_values("bytes_per_step", ascending=False)
    )


def _published(table: DataFrame, field: str) -> Series:
    volumes = [PUBLISHED_VOLUMES.get(str(method)) for method in table["sequence_parallel"]]
    texts = [getattr(volume, field) if volume else None for volume in volumes]
    return Series(texts, table.index, dtype=object)
