"""What terminal and report show of a race."""

from markupsafe import Markup

from vitsweep.extras.race.table import race_in, race_lines, race_table, race_text
from vitsweep.report.answer import SearchResult
from vitsweep.report.html import rendered
from vitsweep.tables.render import BEST
from vitsweep.tables.sweep_tables import SweepTables


def result(tables: SweepTables) -> SearchResult | None:
    """Return table, answer and cost of a race; None where there was none."""
    if not (race := race_in(tables)):
        return None
    table, title = race_table(race), f"Race of sweep {tables.stores[0].name}"
    more = max(0, len(table) - BEST)
    return SearchResult(title, race_text(table.head(BEST)), more, race_lines(race))


def section(tables: SweepTables) -> Markup:
    """Return the whole table; "" where there was no race."""
    if not (race := race_in(tables)):
        return Markup("")
    table = race_text(race_table(race)).to_dict("split")
    return Markup(rendered("race.html.j2", {"race": table}, "vitsweep.extras.race"))
