"""How far predictions were off that were kept before a sweep ran, for its report."""

from markupsafe import Markup
from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.formatting import count
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import numbers, text


def section(tables: SweepTables) -> Markup:
    """Return the sentence for the report of a sweep; empty where nothing was predicted before."""
    sentence = prediction_sentence(tables.cells)
    return Markup("<p>{}</p>").format(sentence) if sentence else Markup("")


def prediction_sentence(cells: DataFrame) -> str:
    """Return how far step times were off that were predicted before the first run, or ""."""
    ends = ["predicted_step_time_ms", "predicted_step_time_low_ms", "predicted_step_time_high_ms"]
    predicted, low, high = (numbers(cells, column) for column in ends)
    measured = numbers(cells, "step_time_ms").where(cells["status"] == Status.measured)
    before = text(cells, "predicted_at").between("1", text(cells, "started_at"))
    ratio = (predicted / measured)[before & (predicted > 0) & (measured > 0)]
    if ratio.empty:
        return ""
    off = ratio.where(ratio > 1, 1 / ratio)
    held = int(((measured >= low) & (measured <= high))[ratio.index].sum())
    factors = {"median": off.median(), "high": off.quantile(0.9)}
    known = low[ratio.index].count()
    return say("predictions", cells=count(len(ratio), "cell"), held=held, all=known, **factors)
