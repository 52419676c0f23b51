"""`write_report`: one self-contained page, with its charts, Markdown and CSV next to it."""

import warnings
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import effects, scaling, speedup, step, style
from vitsweep.charts.style import NOTHING, Chart, conditions, flags
from vitsweep.errors import VitsweepError
from vitsweep.extras import FEATURES, load
from vitsweep.files import remove, write_atomically
from vitsweep.report.answer import MOST, answers, next_command, question, search_result, winners
from vitsweep.report.views import for_people
from vitsweep.results.metrics import headings, known_metrics
from vitsweep.results.provenance import is_own
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.diagnostics import diagnostics
from vitsweep.tables.formatting import count, csv_text, markdown, missing
from vitsweep.tables.names import environment_columns, names_by_id, varying_columns
from vitsweep.tables.notes import empty_metrics, lines_of
from vitsweep.tables.render import cell_text, footnotes, ranked
from vitsweep.tables.scaling import exposed_text
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import MIN_BLOCKS
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells
from vitsweep.tables.valid_runs import text as text_of

FEW_VALUES = 3
FIRST_SCREEN = ("cell", "img/s", "speedup", "result")
"""Columns of the table next to the first chart."""


def write_report(source: SweepTables | Store | Path) -> Path:
    """Write `report/` of a sweep folder and return the path of its `index.html`.

    Next to it: `table.md`, `cells.csv`, every chart as PNG and SVG, `replicates.csv` where the sweep
    repeated settings, `exposed_communication.csv` where scaling was measured, and files of optional features.

    Args:
        source: tables of one sweep, or its folder.

    Raises:
        VitsweepError: the folder holds no cells.
    """
    tables = SweepTables.of(source)
    [store], cells = tables.stores, tables.cells
    if cells.empty:
        raise VitsweepError(f"`{store.root}` holds no records: nothing to report.")
    folder = store.root / "report"
    charts = [
        {"name": c.name, "title": c.title, "caption": text, "svg": saved(folder, c.name, figure)}
        for c, figure, text in drawn(tables)
    ]
    write_atomically(folder / "cells.csv", csv_text(for_people(cells)))
    repeated = tables.replicates
    shown = [repeated, cells] if len(repeated) else [cells]
    write_atomically(folder / "table.md", "\n".join(markdown(cell_text(t)) for t in shown))
    if len(repeated):
        write_atomically(folder / "replicates.csv", csv_text(for_people(repeated)))
    else:
        remove(folder / "replicates.csv")  # of an earlier command
    exposed = _exposed(tables)
    if len(exposed):
        write_atomically(folder / "exposed_communication.csv", csv_text(exposed))
    page = folder / "index.html"
    write_atomically(page, render(store.name, tables, charts, exposed))
    return page


def render(
    name: str, tables: SweepTables, charts: list[dict[str, Any]], exposed: DataFrame = NOTHING
) -> str:
    """Return the page as text.

    Args:
        name: name of the sweep.
        tables: of the sweep.
        charts: name, title, caption and SVG of each chart.
        exposed: the exposed communication that is shown.
    """
    cells, repeated = tables.cells, tables.replicates
    latest = tables.commands[-1] if tables.commands else {}
    limit_key = (latest.get("limit") or {}).get("key") or ""
    asked = cells[cells["cell_id"].isin(latest.get("cells", ()))]
    diagnosed = NOTHING
    if len(tables.runs) and tables.runs["block"].nunique() > MIN_BLOCKS:
        diagnosed = diagnostics(tables.runs, tables.baselines)
    names = names_by_id(cells) if tables.traces else {}
    traced = [(each, tables.traces[cell]) for cell, each in names.items() if cell in tables.traces]
    context = {
        "name": name,
        "question": latest.get("question")
        or question(asked if len(asked) else cells, tables.replicate_key, limit_key),
        "sections": sections(tables),
        "exposed": (exposed_text(exposed) if len(exposed) else NOTHING).to_dict("split"),
        "replicates": cell_text(repeated, wide=True).to_dict("split") if len(repeated) else None,
        "replicated": tables.replicate_key,
        "table": table(cells),
        "numeric": tuple(headings(cells)),
        "charts": charts,
        "measured": conditions(tables.settings),
        "warnings": flags(cells[cells["status"] == Status.measured]),
        "traces": [(each, f"../{path.relative_to(path.parents[4])}") for each, path in traced],
        "diagnostics": diagnosed.to_dict("records"),
        "unmeasured": lines_of(checked_cells(cells, "reason"), cells["status"] != Status.measured),
        "notes": empty_metrics(tables.runs),
        "environment": environment(cells),
        "commands": {str(c["command"]): is_own(c) for c in tables.commands if c.get("command")},
        "metrics": [m for m in known_metrics(cells).values() if m.column in cells],
    }
    return rendered("page.html.j2", context | _first_screen(tables))


def _first_screen(tables: SweepTables) -> dict[str, Any]:
    """Return the answers, and at most `MOST` rows: the fastest of each setting, or the cells ranked first."""
    sentence, best = winners(tables)
    said, latest = [*answers(tables)], tables.commands[-1] if tables.commands else {}
    if latest.get("command") and "comparison" not in latest and not search_result(tables):
        asked = tables.cells[tables.cells["cell_id"].isin(latest.get("cells", ()))]
        step = next_command(tables.settings_of(asked), str(latest["command"]), asked)
        said += [step] if step else []
    notes: list[str] = []
    more = len(best if len(best) else tables.settings) - MOST
    if best.empty:
        best = cell_text(tables.settings).head(MOST)
        best = best[[c for c in FIRST_SCREEN if c in best]]
        marks, notes = footnotes(ranked(tables.settings).head(MOST))
        marked = "result" if "result" in best else "cell"
        best = best.assign(**{marked: best[marked] + marks})
    return {
        "answer": sentence or said[0],
        "answers": [s for s in said if s != sentence] if sentence else said[1:],
        "best": best.head(MOST).to_dict("split"),
        "footnotes": notes,
        "more": count(more, f"more {'setting' if sentence else 'cell'}") if more > 0 else "",
    }


def rendered(template: str, context: Mapping[str, Any], package: str = "vitsweep.report") -> str:
    """Return the page that a template of a package makes, with what it includes of the report's."""
    places = ChoiceLoader([PackageLoader(package), PackageLoader("vitsweep.report")])
    environment = Environment(loader=places, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(context, say=say)


def table(cells: DataFrame) -> dict[str, Any]:
    """Return headings, rows of (text, sort key), and the choices to filter by."""
    text, ordered = cell_text(cells, wide=True), ranked(cells)
    shown = headings(cells) | {"result": "claim"}
    empty = [""] * len(ordered)
    sources = {str(c): shown.get(str(c), str(c)) for c in text}
    columns = [
        [
            (shown_, "" if missing(value) else str(value))
            for shown_, value in zip(text[c], ordered.get(source, empty), strict=True)
        ]
        for c, source in sources.items()
    ]
    choices = {c: sorted(set(text[c])) for c in varying_columns(cells) if c in text}
    return {
        "headings": list(text.columns),
        "rows": list(zip(*columns, strict=True)),
        "filters": {c: v for c, v in choices.items() if len(v) <= 24},
        "classes": np.where(
            ordered["status"] == Status.measured,
            text_of(ordered, "claim").str.replace(" ", "-"),
            "unmeasured",
        ).tolist(),
    }


def environment(cells: DataFrame) -> list[tuple[str, str]]:
    """Return column and values of every environment column; many numbers or times as a range."""
    return [(c, text) for c in environment_columns(cells) if (text := _values(cells[c], c))]


def _exposed(tables: SweepTables) -> DataFrame:
    """Return how much of the communication is hidden, where scaling curves are drawn."""
    if tables.runs.empty:
        return NOTHING
    try:
        return tables.exposed_communication if scaling.SCALING.is_for(tables.settings) else NOTHING
    except VitsweepError as error:  # must not prevent the report of a long sweep
        warnings.warn(f"no table of exposed communication: {error}", ChartWarning, stacklevel=2)
        return NOTHING


def _values(column: Series, name: str) -> str:
    known = [v for v in column.tolist() if not missing(v)]
    distinct = list(dict.fromkeys(map(str, known)))
    if len(distinct) <= FEW_VALUES:
        return ", ".join(distinct)
    if name.endswith("_at") or all(isinstance(v, int | float) for v in known):
        return f"{min(known)} to {max(known)}"
    return f"{', '.join(distinct[:FEW_VALUES])} … ({len(distinct)} values)"


def saved(folder: Path, name: str, figure: Figure) -> Markup:
    """Write a chart as SVG and PNG; return it as an element of a page."""
    svg = style.to_svg(figure)
    write_atomically(folder / f"{name}.svg", svg)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_atomically(folder / f"{name}.png", image.getvalue())
    return Markup(style.themed(svg))


# The charts of a report, each drawn where the sweep has data for it, and sections of optional features.


class ChartWarning(UserWarning):
    """A chart or a section could not be made; the report is written without it."""


CHARTS: tuple[Chart, ...] = (
    speedup.SPEEDUP,
    effects.WATERFALL,
    effects.EFFECTS,
    step.PHASES,
    step.OPTIMIZER_STEP,
    scaling.SCALING,
    scaling.GPU_SCALING,
    scaling.SEQUENCE_LENGTH,
    step.COMMUNICATION,
    step.MEMORY,
)
"""In the order of the page; those of optional features come between."""


def charts_of(tables: SweepTables) -> list[Chart]:
    """Return the charts of a report in the order of the page, those of optional features included."""
    found = list(CHARTS)
    for name in tables.features:
        for chart, before in FEATURES[name].charts.items():
            names = ["", *(other.name for other in found)]
            place = names.index(before) if before in names else len(found)
            found.insert(place, load(f"{name}.charts.{chart}:CHART"))
    return found


def sections(tables: SweepTables) -> list[tuple[str, Markup]]:
    """Return heading and HTML of each section of a report that an optional feature adds.

    A section that raises becomes a sentence: it must not prevent the report of a long sweep.
    """
    found = []
    for name in tables.features:
        feature = FEATURES[name]
        try:
            body = load(f"{name}.{feature.section}")(tables) if feature.section else Markup("")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the section `{name}` could not be made: {why}", ChartWarning, stacklevel=2
            )
            body = Markup("<p>No section: {}.</p>").format(why)
        if body:
            found.append((feature.heading, body))
    return found


def drawn(tables: SweepTables) -> Iterator[tuple[Chart, Figure, str]]:
    """Yield chart, figure and how to read it for every chart that the sweep has the columns for."""
    if tables.runs.empty:
        return
    for chart in charts_of(tables):
        try:
            table = chart.table(tables) if chart.is_for(tables.settings) else NOTHING
            if len(table):
                figure = chart.draw(table)
                if chart.over_baseline:
                    style.name_baseline(figure, tables.settings, table)
                figure = style.freeze_layout(figure)
                reading = chart.reading if isinstance(chart.reading, str) else chart.reading(table)
                yield chart, figure, reading
        except Exception as error:  # a failing chart must not prevent the report of a long sweep
            text = f"the chart `{chart.name}` could not be drawn: {type(error).__name__}: {error}"
            warnings.warn(text, ChartWarning, stacklevel=2)
