"""DSP: Dynamic Sequence Parallelism (arXiv:2403.10266), beside a sweep.

Its three statements about communication ("less than 25 %", "at least 75 % less", "at least 50 % less")
have different baselines and versions; its Table 3 mixes per-device and total volumes. All are shown with
their unit, none is asserted. GPU type and model of its Figure 3 were never found.

    python -m analysis.dsp results/SWEEP
"""

import pandas as pd
from pandas import DataFrame

from analysis.sequences import sequence_rows
from analysis.study import beside, main, without_interval
from vitsweep.extras.published.figures import published, with_conditions
from vitsweep.tables.scaling import communication
from vitsweep.tables.sweep_tables import SweepTables

METHODS = {
    "dsp": "DSP",
    "ulysses": "DeepSpeed-Ulysses",
    "ring": "Ring-Attention",
    "megatron_sp": "Megatron-SP",
}
SENT_PER_DEVICE = {
    "DSP": "2(N-1)/N^2 M",
    "DeepSpeed-Ulysses": "4(N-1)/N^2 M",
    "Ring-Attention": "2(N-1)/N M",
    "Megatron-SP": "8(N-1)/N M",
}
"""Forward of one spatial and one temporal block, sent per rank; derived here, not published."""


_PER_DEVICE = "forward of one spatial + one temporal block, per device; (N-1)/N of it is sent"
VOLUMES = {"dsp": "2M/N", "ulysses": "4M/N", "megatron_sp": "8M", "ring": "2M"}
"""As DSP's ICLR'25 submission prints them in its Table 3 (SECONDARY: review text); M is the activation size
of a block, N the number of devices. Shown beside what is counted, never asserted.

Two all-to-alls of a local tensor of M/N send (N-1)/N of 2M/N from a device. Two all-gathers and two
reduce-scatters of M in each of two blocks send (N-1)/N of 8M, K and V once round a ring (N-1)/N of
2M: from each device, not in total, as the review text has it of these two.
"""


def with_published_volumes(sent: DataFrame) -> DataFrame:
    """Add to a table of `communication` the formula of the paper, and what it counts."""
    formulas = sent["sequence_parallel"].astype(object).map(VOLUMES)
    units = formulas.map(lambda _: _PER_DEVICE, na_action="ignore")
    return sent.assign(published_formula=formulas, published_unit=units)


def communication_volume(sweep: SweepTables) -> DataFrame:
    """Counted activation bytes per rank and step, beside Tables 2 and 3 as printed."""
    counted = communication(sweep.cells)
    own = counted["sequence_parallel"].astype(str)
    methods = own.map(METHODS).fillna(own.where(own != "none"))
    columns = ["system", "cell_id", "world_size", "num_tokens", "activation_bytes_per_step"]
    measured = counted.assign(system=methods).dropna(subset=["system"]).reindex(columns=columns)
    figures = published("DSP.*Table [23]").drop(columns=["experiment", "metric", "number", "doubt"])
    return beside(measured, figures, on=["system"]).assign(
        derived_sent_per_device=lambda t: t["system"].map(SENT_PER_DEVICE)
    )


def end_to_end(sweep: SweepTables) -> DataFrame:
    """Throughput by (temporal, spatial, sp) of video transformers, DSP over Ulysses; a column per method.

    Published are samples per second read off a plot, measured images per second: compare ratios.
    """
    keys = ["temporal", "spatial", "sp"]
    figures = (
        published("DSP v1 Fig. 3")
        .pipe(with_conditions)
        .pivot_table(index=[*keys, "sure", "source"], columns="system", values="number")
        .rename(columns={"DSP": "dsp", "DeepSpeed-Ulysses": "ulysses"})
        .assign(ratio=lambda t: t["dsp"] / t["ulysses"])
        .reset_index()
    )
    rows = sequence_rows(sweep.cells)
    methods = list(dict.fromkeys(["dsp", "ulysses", *rows["method"]]))
    temporal = _numbers(rows, "model.frames") / _numbers(rows, "model.tubelet_frames")
    wide = (
        rows.assign(temporal=temporal, spatial=rows["seq"] / temporal)
        .pivot_table(index=keys, columns="method", values="images_per_second", aggfunc="max")
        .reindex(columns=methods)
        .assign(ratio=lambda t: t["dsp"] / t["ulysses"])
        .reset_index()
    )
    return beside(wide, figures, on=keys).rename(columns=without_interval)


def _numbers(rows: DataFrame, column: str) -> "pd.Series[float]":
    return pd.to_numeric(rows[column]) if column in rows else pd.Series(float("nan"), rows.index)


def claims(sweep: SweepTables) -> DataFrame:
    """What DSP's abstract, documentation and reviews claim, each against its own baseline."""
    figures = published("DSP|VideoSys").query("unit != 'formula' and sure != 'digitised'")
    return figures[["system", "metric", "value", "unit", "conditions", "sure", "source"]]


TABLES = {
    "Communication volume": communication_volume,
    "End to end": end_to_end,
    "Claims": claims,
}

if __name__ == "__main__":
    main("DSP: Dynamic Sequence Parallelism", TABLES)
