"""`vitsweep compare`: two settings in turns, until what can be said about them is said well enough."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pandas import DataFrame, Series
from rich.console import Console

from vitsweep.cli.compare_options import FOLDER, CompareOptions, compare_options
from vitsweep.cli.summary import ENDED_OTHERWISE, INTERRUPTED, OK, explain
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import merge_overrides
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, ImpossibleCellError, VitsweepError
from vitsweep.launchers.block_runner import Runner
from vitsweep.launchers.progress import Progress
from vitsweep.measure.device_name import device_name
from vitsweep.planning.blocks import Block, blocks
from vitsweep.planning.freeze import freeze, open_store
from vitsweep.planning.pending import announce, comparable, known
from vitsweep.planning.provenance import code_state
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels, make_sweep_plan
from vitsweep.report.html import write_report
from vitsweep.report.views import collect
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.trackers import mirror
from vitsweep.spec.machine import Machine
from vitsweep.tables.comparison import Comparison, blocks_wanted, compared, paired
from vitsweep.tables.formatting import count
from vitsweep.tables.show import printed
from vitsweep.tables.tidy import one_device


class Ending(Enum):
    """Why no further block is measured."""

    narrow = auto()
    budget = auto()
    ended_otherwise = auto()
    interrupted = auto()


def compare(arguments: Sequence[str]) -> int:
    """Measure blocks of two settings until the interval is narrow enough or the budget is spent.

    Returns:
        0 if they are compared, 3 if a setting ended otherwise than measured, 130 after Ctrl-C.

    Raises:
        VitsweepError: what was typed is wrong, a setting cannot run, both are one cell, or blocks of
            different devices would be compared; nothing has run.
    """
    options, console = compare_options(arguments), open_console()
    plan, config = _pair(options, Composer())
    settings = sweep_settings(config)
    store = open_store(settings)

    def told() -> None:
        console.print(f"Another command is measuring into `{store.root}`; waiting for it to end.")

    with store.lock(on_wait=told):
        turns = _Turns(store, plan, settings, code_state(), options, console)
        turns.check_device()
        freeze(store, plan, settings, turns.code)
        turns.measure()
        return _finish(turns, config)


def _pair(options: CompareOptions, composer: Composer) -> tuple[SweepPlan, dict[str, Any]]:
    """Return the two cells, the baseline last, and the configuration of the command."""
    settings = (options.variant, options.baseline)
    _refuse_others([*options.common, *options.variant, *options.baseline], composer)
    variant, baseline = (
        composer.compose(merge_overrides([(FOLDER,), options.common, setting], composer))
        for setting in settings
    )
    if variant.tree["sweep"] != baseline.tree["sweep"]:
        raise BadValueError("`sweep.*` is one for A and B: give it after both.")
    plan = make_sweep_plan([variant, baseline], Machine.here(), lambda cell: baseline)
    if reasons := [reason for e in plan.entries.values() for reason in e.reasons]:
        raise ImpossibleCellError(list(dict.fromkeys(reasons)))
    if len(plan.entries) < 2:
        names = " and ".join(f"`{name}`" for name in options.names)
        raise VitsweepError(
            f"{names} are the same cell ({next(iter(plan.entries))}): there is nothing to compare. "
            "Look at both with `python -m vitsweep plan ...`."
        )
    return plan, _with_question(variant, options)


def _refuse_others(texts: Sequence[str], composer: Composer) -> None:
    """Refuse what makes several cells of one, and what asks for another launcher."""
    for override in composer.parse(texts):
        text = override.input_line
        if override.is_sweep_override():
            raise BadValueError(f"`{text}` is several settings; `compare` takes one A and one B.")
        if str(override.key_or_group).split(".")[0].split("/")[0] == "hydra":
            raise BadValueError(
                f"`{text}`: `compare` measures on this machine. On a cluster type it inside an "
                "allocation of one node (`salloc -N1 ... python -m vitsweep compare ...`)."
            )


def _with_question(asked: ComposedCell, options: CompareOptions) -> dict[str, Any]:
    variant, baseline = options.names
    question = asked.tree["sweep"]["question"] or f"How does {variant} compare with {baseline}?"
    return {**asked.tree, "sweep": {**asked.tree["sweep"], "question": question}}


@dataclass
class _Turns:
    """The blocks of one comparison: those in the store, and those that this command adds."""

    store: Store
    plan: SweepPlan
    settings: SweepSettings
    code: dict[str, Any]
    options: CompareOptions
    console: Console
    ending: Ending = Ending.narrow
    seconds_per_block: float = 0.0

    def __post_init__(self) -> None:
        self.variant, self.baseline = self.plan.entries
        anew = self.settings.remeasure
        self._old = set(self._runs()["block"]) if anew and len(self._runs()) else set()

    def log_ratios(self) -> list[float]:
        """Return one log ratio per block, oldest first."""
        return paired(self._used(), self.variant, self.baseline, self.options.mixed_hardware)

    @property
    def result(self) -> Comparison:
        """What may be said by now."""
        return compared(self.log_ratios())

    def check_device(self) -> None:
        """Refuse to add blocks of this machine's device to those of another."""
        here = device_name(self.plan.entries[self.variant].spec.resources.device)
        row = {"status": Status.measured, "device": here}
        one_device_of(DataFrame([*self._used().to_dict("records"), row]), self)

    def measure(self) -> None:
        """Run the blocks that are missing; `ending` says why there are no more."""
        todo = known(self.plan, self.store.runs(), self.settings, self.code)
        statuses = ",".join(sorted({str(run.status) for run in todo.ended.values()}))
        again = f"`sweep.retry=[{statuses}]` at the end of the command measures them again"
        announce(todo, again, self.console)
        runner = Runner(self.store, self.code)
        runner.over |= set(todo.ended)
        progress = Progress(self.console, cell_labels(self.plan), 0)
        if runner.run(self._planned(runner, progress), progress):
            self.ending = Ending.interrupted

    def _planned(self, runner: Runner, progress: Progress) -> Iterator[Block]:
        lacking = dict.fromkeys(self.plan.entries, 1)
        yield from runner.continued(self.plan, lacking, 1, self.console)[0]
        begin, done, before = time.monotonic(), 0, -1
        while True:
            logs = self.log_ratios()
            wanted = blocks_wanted(logs, self.options.width)
            spent = time.monotonic() - begin
            self.seconds_per_block = spent / done if done else 0.0
            if runner.over or len(logs) == before:
                self.ending = Ending.ended_otherwise
                return
            if len(logs) >= wanted:
                self.ending = Ending.narrow
                return
            if done and spent + self.seconds_per_block > 60 * self.options.minutes:
                self.ending = Ending.budget
                return
            progress.expects(2 * (wanted - len(logs)))
            yield next(blocks(self.plan, dict.fromkeys(self.plan.entries, 1), 1))
            done, before = done + 1, len(logs)

    def _used(self) -> DataFrame:
        """Return the runs that may stand for the two cells, one row each."""
        runs = self._runs()
        return runs[~runs["block"].isin(self._old)] if len(runs) else runs

    def _runs(self) -> DataFrame:
        torch_version = self.code["packages"]["torch"]
        entries = self.plan.entries.items()
        return DataFrame(
            [
                run.row()
                for cell_id, entry in entries
                for run in self.store.runs(cell_id)
                if comparable(run, entry, torch_version)
            ]
        )


def one_device_of(runs: DataFrame, turns: _Turns) -> DataFrame:
    """`one_device`, with the way out that `compare` has."""
    try:
        return one_device(runs, turns.options.mixed_hardware)
    except VitsweepError:
        devices = ", ".join(map(str, dict.fromkeys(runs["device"].dropna())))
        raise VitsweepError(
            f"`{turns.store.root}` holds blocks of these settings on another device than this "
            f"({devices}). Measure into another folder (`sweep.name=NAME`), or take them together "
            "with `--mixed-hardware`."
        ) from None


def _finish(turns: _Turns, config: dict[str, Any]) -> int:
    """Write the views, show the two rows and the sentence, and return the exit code."""
    table, result = collect(turns.store), turns.result
    rows = table[table["cell_id"].isin(turns.plan.entries)]
    shown = _with_result(rows, turns, result) if result.num_blocks else rows
    console = turns.console
    console.print()
    console.print(printed(shown, title=f"Sweep {turns.store.name}"))
    explain(shown, console)
    records = [{str(k): v for k, v in row.items()} for row in rows.to_dict("records")]
    told = mirror(turns.store, records, config.get("tracker") or {})
    any_measured = (rows["status"] == Status.measured).any()
    report = f"Report: {write_report(turns.store)}" if any_measured else ""
    for line in filter(None, [*_sentences(turns, result), report, told]):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    codes = {Ending.ended_otherwise: ENDED_OTHERWISE, Ending.interrupted: INTERRUPTED}
    return codes.get(turns.ending, OK)


def _with_result(rows: DataFrame, turns: _Turns, result: Comparison) -> DataFrame:
    """Give the two rows this comparison's ratio, interval and claim.

    The views keep Student's interval over all blocks, like those of any sweep: after a stop that
    the pilot decided it covers 93 to 95 %, simulated.
    """
    is_variant = rows["cell_id"] == turns.variant
    numbers = {
        "speedup": result.ratio,
        "speedup_low": result.low,
        "speedup_high": result.high,
    }
    return rows.assign(
        **{c: Series(v, rows.index).where(is_variant, rows[c]) for c, v in numbers.items()},
        claim=Series("baseline", rows.index).mask(is_variant, result.claim),
    )


def _sentences(turns: _Turns, result: Comparison) -> Iterator[str]:
    asked = f"+- {100 * turns.options.width:.3g} %"
    if result.num_blocks:
        yield result.sentence(*turns.options.names)
    reached = f"+- {100 * result.half_width:.2g} %" if result.low == result.low else "still unknown"
    if turns.ending is Ending.narrow:
        yield f"The interval is {reached}; {asked} was asked for."
    elif turns.ending is Ending.budget:
        more = blocks_wanted(turns.log_ratios(), turns.options.width) - result.num_blocks
        minutes = max(1, round(more * turns.seconds_per_block / 60))
        yield (
            f"The budget of {turns.options.minutes:g} min is spent and the interval {reached}, not "
            f"{asked}: about {count(more, 'more block')} ({minutes} min); the same command continues."
        )
    elif turns.ending is Ending.interrupted:
        yield "Stopped. What was measured is kept; the same command continues."
    else:
        yield "Not every block measured both settings: see the status above."
