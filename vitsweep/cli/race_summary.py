"""What a race shows at its end: answer, table, effects of the techniques, cost, diagnostics."""

from rich.console import Console

from vitsweep.console import print_lines
from vitsweep.results.race_file import read_race
from vitsweep.results.store import Store
from vitsweep.tables.effects import effects, sentences
from vitsweep.tables.load import sweep_of
from vitsweep.tables.race import has_begun, presented_race, race_answer, race_lines, race_table
from vitsweep.tables.terminal import BEST, as_table


def show_race(store: Store, console: Console) -> str | None:
    """Print the result of a race; return the leader's cell id, None where there is none."""
    race = read_race(store.root)
    table = race_table(race)
    console.print(as_table(presented_race(table.head(BEST)), f"Race of sweep {store.name}"))
    if len(table) > BEST:
        console.print(f"{len(table) - BEST} more cells stand in the report.", highlight=False)
    sweep = sweep_of(store)
    lines = [race_answer(race), *race_lines(race)]
    if len(sweep.runs) and has_begun(race):
        lines += sentences(effects(sweep.runs, sweep.baselines))
    print_lines(console, lines)
    return race.get("leader")
