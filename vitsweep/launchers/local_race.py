"""A race on this machine: blocks one after the other, each chosen from the runs of those before."""

from collections.abc import Iterator
from itertools import chain

from vitsweep.launchers.base import LaunchRequest, PreparedSweep
from vitsweep.launchers.block_runner import BlockRunner
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import Block, repeated_runs
from vitsweep.planning.notices import print_notices
from vitsweep.planning.prediction_before_run import traced_throughput
from vitsweep.planning.race_plan import describe_refused
from vitsweep.planning.race_rounds import RaceRounds
from vitsweep.planning.sweep_plan import cell_labels


def run_race(sweep: PreparedSweep, request: LaunchRequest, parallel: int) -> bool:
    """Run blocks until the race has ended; True if the user stopped it.

    Raises:
        BadValueError: the race cannot begin, see `RaceRounds.check`.
    """
    store, plan, console = sweep.store, sweep.plan, request.console
    earlier = list(store.runs())
    predicted = traced_throughput(plan)
    rounds = RaceRounds(plan, request.settings, store, sweep.code, earlier, predicted=predicted)
    rounds.check()
    if refused := describe_refused(plan):
        console.print(refused, highlight=False)
    runner = BlockRunner(store, sweep.code, parallel, earlier)
    begin = rounds.state(())
    print_notices(begin, plan, store, f"`vitsweep retry {store.name}` runs them again", console)
    runner.skipped |= set(begin.not_measured)
    once = {e.cell_id: 1 for e in plan.runnable if e.cell_id not in begin.not_measured}
    resumed = runner.resume(plan, once, 1, console)
    progress = Progress(console, cell_labels(plan), 0)

    def raced() -> Iterator[Block]:
        while blocks := rounds.next(runner.records):
            for number, block in enumerate(blocks):
                progress.expects(sum(len(b.entries) for b in blocks[number:]))
                yield block
                if repeated := repeated_runs(block, runner.records, rounds.state(runner.records)):
                    yield repeated

    interrupted = runner.run(chain(resumed, raced()), progress)
    if interrupted:
        rounds.note(runner.records)
    return interrupted
