"""A page of a plan: every cell with its predictions."""

from collections.abc import Hashable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pandas import DataFrame
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

from vitsweep.tables.formatting import number, plain, whole


def plan_page(name: str, table: DataFrame) -> str:
    """Return the page, complete in itself.

    Args:
        name: of the sweep.
        table: one row per cell; columns that are empty are left out.
    """
    shown = table.loc[:, table.notna().any() & (table.astype(str) != "").any()]
    numeric = {c for c in shown if is_numeric_dtype(shown[c]) and not is_bool_dtype(shown[c])}
    counts = {c for c in numeric if is_integer_dtype(shown[c])}

    def text(column: Hashable, value: Any) -> str:
        if column in counts:
            return whole(value)
        return number(value, 4) if column in numeric else plain(value)

    rows = [
        [(text(c, v), c in numeric) for c, v in row.items()] for row in shown.to_dict("records")
    ]
    environment = Environment(
        loader=PackageLoader("vitsweep.report"), autoescape=True, undefined=StrictUndefined
    )
    heads = [(str(c), c in numeric) for c in shown]
    template = environment.get_template("plan.html.j2")
    return template.render(name=name, heads=heads, rows=rows, states=_tally(table))


def _tally(table: DataFrame) -> str:
    counts = table["state"].value_counts(sort=False).items() if len(table) else ()
    return " · ".join(f"{state} {count}" for state, count in counts)
