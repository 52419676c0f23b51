"""Shared by all studies: read the sweep, print its tables and measuring conditions."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series
from rich.console import Console

from vitsweep.charts import style
from vitsweep.charts.style import caption
from vitsweep.errors import VitsweepError
from vitsweep.tables.formatting import as_text, markdown, number
from vitsweep.tables.sweep_tables import SweepTables

Table = Callable[[SweepTables], DataFrame]


def sweep_from_environment(sample: str = "analysis/sample") -> SweepTables:
    """Read the folders that the environment variable SWEEP names, `,` between them, or a sample.

    Relative ones start at the root of the checkout: a notebook runs in its own folder, wherever
    Jupyter was started.

    Raises:
        VitsweepError: a folder holds no records.
    """
    folders = os.environ.get("SWEEP", sample).split(",")
    return SweepTables.read(*(Path(__file__).parents[1] / folder for folder in folders))


def conditions(row: Series) -> str:
    """Return the conditions of a measured row in the format of the published figures."""
    parts = {
        "": f"{row.get('world_size', '')}x{row.get('device', '')}",
        "model": row.get("model"),
        "images per step": row.get("images_per_step"),
        "px": row.get("resolution_px"),
        "tokens": row.get("num_tokens"),
    }
    return "; ".join(f"{name} {value}".strip() for name, value in parts.items())


RATIOS = ("relative_throughput", "step_ratio", "ratio")


def without_interval(column: str) -> str:
    """Return the heading of a column of bare ratios, `ratio (no interval)`; others as they are."""
    return f"{column} (no interval)" if str(column).removeprefix("published_") in RATIOS else column


def beside(measured: DataFrame, figures: DataFrame, on: Sequence[str]) -> DataFrame:
    """Join figures to measured rows with the same values of `on`; rows without a partner stay.

    A cell is empty where nothing was published or nothing was measured. The columns of `figures`
    get the prefix `published_`.
    """
    renamed = figures.rename(columns={c: f"published_{c}" for c in figures if c not in on})
    return measured.merge(renamed, on=list(on), how="outer", sort=False)


def with_conditions(cells: DataFrame) -> DataFrame:
    """Add `conditions`, shown beside every figure that is compared."""
    texts = [conditions(row) for _, row in cells.iterrows()]
    return cells.assign(conditions=Series(texts, cells.index, dtype=object))


def main(title: str, tables: Mapping[str, Table]) -> None:
    """Print the tables of a study as Markdown for the sweep folders on the command line."""
    console = Console(soft_wrap=True, highlight=False)
    parser = argparse.ArgumentParser(
        description=f"{title}: published figures beside measured ones."
    )
    parser.add_argument(
        "folders", nargs="*", default=["analysis/sample"], help="sweep folders (analysis/sample)"
    )
    folders = parser.parse_args().folders
    try:
        sweep = SweepTables.read(*folders)
    except VitsweepError as error:
        parser.error(str(error))
    console.print(f"# {title}\n\nMeasured: {', '.join(folders)}: {caption(sweep.cells)}\n")
    for name, table in tables.items():
        console.print(f"## {name}\n")
        console.print(markdown(as_text(rounded(table(sweep)))), markup=False)


def rounded(table: DataFrame) -> DataFrame:
    """Return the table with fractional numbers as text in three digits, whole ones whole."""
    floats = table.select_dtypes("floating")
    whole = [c for c in floats if (floats[c].dropna() % 1 == 0).all()]
    texts = {c: floats[c].map(number).astype(str) for c in floats if c not in whole}
    return table.astype(dict.fromkeys(whole, "Int64")).copy().assign(**texts)


def show(figure: Figure) -> Any:
    """Return the figure as an SVG that a notebook displays."""
    from IPython.display import SVG

    return SVG(style.to_svg(style.freeze_layout(figure)))
