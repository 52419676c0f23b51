"""Rows and columns of a table by what a user typed: `collect --where`, `--sort`, `--columns`."""

from collections.abc import Sequence
from difflib import get_close_matches

from pandas import DataFrame, Series
from pandas.api.types import is_bool_dtype

from vitsweep.errors import BadValueError
from vitsweep.results.metrics import headings, known_metrics
from vitsweep.tables.formatting import number, plain


def where(cells: DataFrame, condition: str) -> DataFrame:
    """Return the rows for which a condition of `DataFrame.query` holds, `world_size == 4`.

    Raises:
        BadValueError: the condition cannot be read, names an unknown column, or holds for no row;
            the text says which.
    """
    from pandas.errors import UndefinedVariableError

    try:
        holds = cells.eval(condition, engine="python")
    except UndefinedVariableError as error:
        name = str(error).partition("'")[2].partition("'")[0]
        raise _unknown(cells, f"--where '{condition}'", name) from error
    except Exception as error:  # the condition is evaluated: any error is one of what was typed
        fault = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    else:
        if isinstance(holds, Series) and is_bool_dtype(holds):
            return _some(cells[holds.fillna(False)], condition)
        fault = "it is not true or false for each row"
    raise BadValueError(
        f"`--where '{condition}'` is no condition over the columns: {fault}. Examples: "
        "`--where 'world_size == 4'`, `--where 'precision == \"O2\" and speedup > 1.2'`."
    )


def _some(kept: DataFrame, condition: str) -> DataFrame:
    if kept.empty:
        raise BadValueError(f"`--where '{condition}'` holds for no cell of the sweep.")
    return kept


def sorted_by(cells: DataFrame, column: str) -> DataFrame:
    """Return the rows by a column: the best value of a metric first, the smallest of anything else.

    Rows without a value come last.

    Args:
        cells: one row per cell.
        column: of `cells.csv`, or a heading of the result table such as `img/s`; with a minus in front
            the order is turned round.

    Raises:
        BadValueError: there is no such column.
    """
    is_reversed = column.startswith("-") and column not in cells
    known = _known(cells, f"--sort {column}", column[1:] if is_reversed else column)
    metrics = known_metrics(cells)
    best_is_high = known in metrics and metrics[known].better == "higher"
    return cells.sort_values(
        known, ascending=best_is_high == is_reversed, kind="stable", na_position="last"
    )


def columns(cells: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the named columns as text; numbers that are not whole with four significant digits.

    Raises:
        BadValueError: there is no such column.
    """
    option = f"--columns {','.join(names)}"
    known = [_known(cells, option, name) for name in names]
    return DataFrame(
        {name: [_text(v) for v in cells[name]] for name in known}, cells.index, dtype=str
    )


def _text(value: object) -> str:
    text = plain(value)
    is_fraction = isinstance(value, float) and text not in ("", "inf", "-inf") and "." in text
    return number(value, 4) if is_fraction else " ".join(text.split())


def _known(cells: DataFrame, option: str, name: str) -> str:
    """Return the column that is meant by its name or by its heading."""
    name = name if name in cells else headings(cells).get(name, name)
    if name not in cells:
        raise _unknown(cells, option, name)
    return name


def _unknown(cells: DataFrame, option: str, name: str) -> BadValueError:
    close = get_close_matches(name, map(str, cells.columns), n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else ""
    return BadValueError(
        f"`{option}`: the table has no column `{name}`.{meant} All columns are the first line of "
        "`cells.csv` in the sweep's folder."
    )
