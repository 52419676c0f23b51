"""What `plan` says of a race: how it would proceed, and what it costs at most."""

from vitsweep.planning.race_cells import seconds_of
from vitsweep.planning.race_rounds import RaceRounds
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.tables.formatting import count


def describe_race(rounds: RaceRounds) -> str:
    """Return how a race would proceed, for `plan`.

    Raises:
        BadValueError: it could not begin.
    """
    rounds.check()
    race, settings = rounds.race, rounds.settings
    size, num = race.block_size, len(rounds.cells.entries)
    done = seconds_of(rounds.earlier)
    bound = f"at most {count(rounds.grid_runs, 'run')}, as many as the full grid takes"
    if rounds.budget is not None:
        typed, seconds = rounds.budget
        bound = f"as many blocks as {typed} allows"
        if done:
            per_run = done / len(rounds.earlier)
            bound += f", about {count(int(seconds / per_run), 'run')} of {per_run:.2g} s"
    sought = "leader, baseline and the cells most likely to beat them"
    fresh = "leader, baseline and runner-up"
    if settings.is_front:
        sought = "leader, baseline and cells that may belong to the front, beside members of it"
        fresh = "the front and its baseline"
    return (
        f"Race of {count(num, 'cell')} in blocks of up to {min(size, num)} runs: first "
        f"{race.num_start_blocks} that cover cells at random, then each with {sought}; {bound}; then "
        f"{settings.confirm} fresh blocks of {fresh}. The column `runs` is that of a grid; a full one of "
        f"{rounds.grid_blocks} blocks takes {rounds.grid_runs:,} runs."
    )


def describe_refused(plan: SweepPlan) -> str:
    """Return how many cells are not in a race because a rule refuses them; empty where none is."""
    refused = len(plan.entries) - len(plan.runnable)
    if not refused:
        return ""
    return (
        f"{refused:,} of {count(len(plan.entries), 'cell')} cannot run and are not in the race: `plan` "
        "in front of the command lists the reasons."
    )
