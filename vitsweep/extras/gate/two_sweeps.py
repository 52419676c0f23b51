"""Two sweeps of the same cells: which speedups changed from one to the other, as table and page."""

from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.bars import Bars
from vitsweep.charts.speedup import MOST
from vitsweep.charts.style import caption
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.sweep_diff import changes_in_words, sweep_diff
from vitsweep.files import write_atomically
from vitsweep.report.html import rendered, saved
from vitsweep.results.store import Store
from vitsweep.tables.formatting import (
    Column,
    csv_text,
    markdown,
    number,
    ratio,
    ratios,
    status_words,
    text_columns,
    values,
)
from vitsweep.tables.names import names_by_id
from vitsweep.tables.stats import SHOWN, Claim
from vitsweep.tables.sweep_tables import SweepTables


def changed(a: SweepTables, b: SweepTables) -> DataFrame:
    """Return which speedups of the same cells changed from A to B: the table of `sweep_diff`."""
    return sweep_diff(a.runs, b.runs, a.baselines, b.baselines)


NUMERIC = ("img/s A", "img/s B", "speedup A", "speedup B", "B over A", "blocks A", "blocks B")


def write_page(store_a: Store | Path, store_b: Store | Path) -> Path:
    """Compare the speedups of two sweep folders on one page and return its path.

    The page is `report/against_<name of A>/index.html` in the folder of B; beside it `changes.csv`,
    `changes.md`, and the chart as PNG and SVG.

    Raises:
        VitsweepError: both are the same folder, one holds no run, or they share no cell.
    """
    a, b = (s if isinstance(s, Store) else Store(s) for s in (store_a, store_b))
    if a.root.resolve() == b.root.resolve():
        raise VitsweepError(f"`{a.root}` is named twice: a comparison needs two sweep folders.")
    sweeps = {"A": SweepTables.of(a), "B": SweepTables.of(b)}
    for store, sweep in zip((a, b), sweeps.values(), strict=True):
        if sweep.runs.empty:
            raise VitsweepError(f"`{store.root}` holds no runs: nothing to compare.")
    changes = changed(sweeps["A"], sweeps["B"])
    if changes["claim"].isin(["only in A", "only in B"]).all():
        raise VitsweepError(
            f"`{a.root}` and `{b.root}` have no cell in common: a cell is the same where its whole "
            "spec is. Run the same command on both days or machines."
        )
    names = _names(sweeps)
    folder = b.root / "report" / f"against_{a.name}"
    text = changes_text(changes, names)
    write_atomically(folder / "changes.csv", csv_text(changes))
    write_atomically(folder / "changes.md", markdown(text))
    context = {
        "names": {"A": a.name, "B": b.name},
        "folders": {"A": str(a.root), "B": str(b.root)},
        "answer": changes_in_words(changes.assign(cell_id=changes["cell_id"].map(names))),
        "captions": {side: caption(sweep.cells) for side, sweep in sweeps.items()},
        "table": text.to_dict("split"),
        "numeric": NUMERIC,
        "chart": _chart(changes, names, folder),
    }
    page = folder / "index.html"
    write_atomically(page, rendered("two_sweeps.html.j2", context, __package__))
    return page


def changes_text(changes: DataFrame, names: dict[str, str]) -> DataFrame:
    """Return the table of `sweep_diff` as text; `names` are what cells are called."""
    return text_columns(
        changes.assign(name=changes["cell_id"].map(lambda c: names.get(c, c))), _SHOWN
    )


def _statuses(changes: DataFrame) -> list[str]:
    pairs = zip(*(changes[f"status_{side}"].map(status_words) for side in "ab"), strict=True)
    return [a if a == b else f"{a} in A, {b} in B" for a, b in pairs]


_SHOWN: dict[str, Column] = {
    "cell": values("name"),
    "img/s A": values("images_per_second_a", number),
    "img/s B": values("images_per_second_b", number),
    "speedup A": ratios("speedup_a"),
    "speedup B": ratios("speedup_b"),
    "B over A": ratios("change"),
    "claim": values("claim"),
    "blocks A": values("num_blocks_a"),
    "blocks B": values("num_blocks_b"),
    "status": _statuses,
}


def _names(sweeps: dict[str, SweepTables]) -> dict[str, str]:
    """Return what cells are called; those of B by what varies in B."""
    return names_by_id(sweeps["A"].cells) | names_by_id(sweeps["B"].cells)


def _chart(changes: DataFrame, names: dict[str, str], folder: Path) -> Markup | None:
    if not (changes["change"].notna() & (changes["claim"] != Claim.baseline)).any():
        return None
    return saved(folder, "days", style.freeze_layout(draw_changes(changes, names)))


def draw_changes(table: DataFrame, names: dict[str, str]) -> Figure:
    """Draw what changed from one sweep to another: bars are B with 95 % intervals, hollow marks are A.

    A change that is shown is dark and has its size beside it; the others are grey.

    Args:
        table: one row per cell, the largest changes on top.
        names: cell -> the name that is shown.
    """
    shown = table[table["change"].notna() & (table["claim"] != Claim.baseline)].head(MOST)
    bars = Bars(
        column="speedup_b", low="speedup_b_low", high="speedup_b_high", mark="speedup_a", marked="A",
        label=f"{style.axis_label('speedup')}, of B", reference=1.0, note=_change,
        colour=lambda row: style.PALETTE[0] if row["claim"] in SHOWN else style.BASELINE,
    )  # fmt: skip
    return bars.draw(shown, [names.get(c, str(c)) for c in shown["cell_id"]])


def _change(row: Series) -> str:
    size = ratio(row["change"], row["change_low"], row["change_high"])
    return f"{size} B / A" if row["claim"] in SHOWN else ""
