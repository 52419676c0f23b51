"""Bytes sent per rank and step: counted by purpose, and what the formula says."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts.style import Bars, Chart, labels
from vitsweep.tables.formatting import cell_label, number
from vitsweep.tables.scaling import PURPOSES, communication
from vitsweep.tables.sweep_tables import SweepTables

MIB = 2.0**20
MOST = 30
COLOURS = dict(zip(PURPOSES, ("#4477aa", "#88ccee", "#aa4499", "#bbbbbb"), strict=True))


def table_of(tables: SweepTables) -> DataFrame:
    """Return the bytes sent, where anything was sent."""
    table = communication(tables.settings)
    return table[table["bytes_per_step"] > 0]


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.scaling.communication`: stacked counts, a diamond at the formula's total."""
    purposes = [p for p in PURPOSES if p in table]
    formulas = table[[c for c in table if str(c).startswith("predicted_")]]
    total = formulas.sum(axis=1, min_count=max(len(formulas.columns), 1))
    mib = table[purposes] / MIB
    shown = table.assign(**mib, mib=mib.sum(axis=1), formula=total / MIB, name=_names(table))
    shown = shown.sort_values("bytes_per_step", ascending=False).head(MOST)
    bars = Bars(
        column="mib", label="Sent per rank and step (MiB)", mark="formula", marked="formula",
        parts={p: (COLOURS[p], p.partition("_")[0]) for p in purposes},
        note=lambda row: f"{number(row['mib'])} MiB",
    )  # fmt: skip
    return bars.draw(shown, shown["name"].tolist())


def _names(table: DataFrame) -> list[str]:
    degrees = [str(c) for c in table if str(c).startswith("mesh.")]
    sizes = [c for c in ("world_size", "num_tokens", *degrees) if table[c].nunique() > 1]
    rows = zip(labels(table), table.iterrows(), strict=True)
    return [" · ".join(filter(None, (name, cell_label(row, sizes)))) for name, (_, row) in rows]


CHART = Chart("Communication", table_of, draw)
