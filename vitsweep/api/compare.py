"""Two settings measured in turns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from html import escape
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.errors import ExitCode, VitsweepError
from vitsweep.launchers.few_files import locked
from vitsweep.launchers.local import BlockRunner
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    blocks,
    look_blocks,
    repeated_runs,
    seconds_of_block,
    within_minutes,
)
from vitsweep.planning.freeze import code_state, freeze, open_store
from vitsweep.planning.pair import ComparisonRequest, PlannedPair
from vitsweep.planning.pending import (
    ResumeState,
    has_typed_blocks,
    print_notices,
    resume_state,
    usable_runs,
)
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels
from vitsweep.rates.profile import device_name
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.trackers import check_tracker
from vitsweep.tables.comparison import (
    Comparison,
    as_self_test,
    blocks_wanted,
    compared_runs,
    paired,
    self_test_arms,
)
from vitsweep.tables.formatting import count
from vitsweep.tables.speedup import one_look
from vitsweep.tables.valid_runs import one_device

# Two settings measured in turns, until the interval on their ratio is narrow enough.


class StopReason(Enum):
    """Why no further block is measured."""

    narrow_enough = auto()
    far_apart = auto()
    budget_spent = auto()
    not_measured = auto()
    interrupted = auto()

    @property
    def exit_code(self) -> ExitCode:
        """That of a command which ended so."""
        codes = {"not_measured": ExitCode.not_all_measured, "interrupted": ExitCode.interrupted}
        return codes.get(self.name, ExitCode.ok)


@contextmanager
def measured_pair(planned: PlannedPair, console: Console) -> Iterator["PairedComparison"]:
    """Measure blocks of two settings until the interval is narrow enough or the budget is spent.

    The sweep stays locked until the `with` block ends.

    Raises:
        VitsweepError: blocks of different devices would be compared; nothing has run.
    """
    plan, settings, tracker, request, defaults = planned
    if defaults:
        console.print(defaults)
    settings = replace(settings, looks=settings.looks is not False)  # on any device
    plan = within_minutes(plan, request.minutes)
    check_tracker(tracker)
    store = open_store(settings)
    with locked(store, console):
        pair = PairedComparison(store, plan, settings, tracker, code_state(), request, console)
        pair.check_device()
        # Traced blocks are a fixed number: they count like any block of their sweep.
        facts = {} if request.traced_blocks else {"comparison": pair.facts}
        freeze(store, plan, settings, pair.code, **facts)
        pair.measure()
        yield pair


@dataclass
class PairedComparison:
    """The blocks of one comparison: those in the store, and those that this command adds.

    Attributes:
        is_self_test: A and B are the same cell. Each block then runs it twice, and the block's random
            name decides which run stands for A: an interval without 1 is a false claim.
        stop_reason: why there are no more blocks, once `measure` has returned.
        seconds_per_block: latest duration of a block, or of the looks before any; 0 before these.
        slowdown: how many times slower than the baseline the variant was in its look; 0 without one.
    """

    store: Store
    plan: SweepPlan
    settings: SweepSettings
    tracker: Mapping[str, Any]
    code: dict[str, Any]
    request: ComparisonRequest
    console: Console
    stop_reason: StopReason = StopReason.narrow_enough
    seconds_per_block: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        cells = list(self.plan.entries)
        self.is_self_test = len(cells) == 1
        self.variant, self.baseline = self_test_arms(cells[0]) if self.is_self_test else cells
        used = set() if self.settings.remeasure else {run["block"] for run in self._rows()}
        stored = (run for cell_id in cells for run in self.store.runs(cell_id))
        earlier = {run.block for run in stored if not run.is_look}
        self._left_out_blocks = earlier - used

    @property
    def facts(self) -> dict[str, Any]:
        """What the command's line in the store says, so that the report shows the same result."""
        return {
            "names": self.request.names,
            "left_out_blocks": sorted(self._left_out_blocks),
            "mixed_hardware": self.request.mixed_hardware,
        }

    def log_ratios(self) -> list[float]:
        """Return log(variant / baseline) of throughput for each block, oldest first."""
        return paired(*self._compared)

    @property
    def result(self) -> Comparison:
        """The ratio with its interval, over the blocks measured so far."""
        return compared_runs(*self._compared)

    @property
    def _compared(self) -> tuple[DataFrame, str, str, bool]:
        return self._used(), self.variant, self.baseline, self.request.mixed_hardware

    def check_device(self) -> None:
        """Refuse to add blocks of this machine's device to those of another.

        Raises:
            VitsweepError: the store holds blocks of another device.
        """
        first = next(iter(self.plan.entries.values()))
        here = device_name(first.spec.resources.device)
        row = {"status": Status.measured, "device": here}
        runs = DataFrame([*self._used().to_dict("records"), row])
        try:
            one_device(runs, self.request.mixed_hardware)
        except VitsweepError:
            devices = ", ".join(map(str, dict.fromkeys(runs["device"].dropna())))
            raise VitsweepError(
                f"`{self.store.root}` holds blocks of these settings on another device than this "
                f"({devices}). Measure into another folder (`sweep.name=NAME`), or take them "
                "together with `--mixed-hardware`."
            ) from None

    def measure(self) -> None:
        """Run the blocks that are missing; `stop_reason` says why there are no more."""
        earlier = list(self.store.runs())
        state = resume_state(self.plan, earlier, self.settings, self.code)
        statuses = ",".join(sorted({str(run.status) for run in state.not_measured.values()}))
        again = f"`sweep.retry=[{statuses}]` at the end of the command measures them again"
        state = replace(state, changed_code={}, accepted_code={}, unproved=())
        print_notices(state, self.plan, self.store, again, self.console)
        if self._left_out_blocks and not self.settings.remeasure:
            self.console.print(
                f"{count(len(self._left_out_blocks), 'earlier block')} left out, but kept: measured by "
                "other code, with another torch, or without the proof, window or traced steps that are "
                "wanted now.",
            )
        looks_between = not self.request.traced_blocks
        runner = BlockRunner(self.store, self.code, earlier=earlier, any_look=looks_between)
        runner.skipped |= set(state.not_measured)
        progress = Progress(self.console, cell_labels(self.plan), 0, 60 * self.request.minutes)
        if runner.run(self._blocks(runner, state, progress), progress):
            self.stop_reason = StopReason.interrupted

    def _blocks(
        self, runner: BlockRunner, state: ResumeState, progress: Progress
    ) -> Iterator[Block]:
        once = dict.fromkeys(self.plan.entries, 1)
        order = BalancedOrder.after(runner.earlier)
        yield from runner.resume(self.plan, once, 1, self.console)
        if not self.request.traced_blocks:
            yield from self._looks(runner, state, progress)
        if self.stop_reason is StopReason.far_apart:
            return
        num_before = -1
        while True:
            logs = self.log_ratios()
            wanted = self.request.traced_blocks or blocks_wanted(logs, self.request.width)
            block = next(blocks(self.plan, once, 1, order))
            if self.is_self_test:
                block = replace(block, entries=2 * block.entries)
            self.seconds_per_block = seconds_of_block(block, [*runner.earlier, *runner.records])
            if runner.skipped or len(logs) == num_before:
                self.stop_reason = StopReason.not_measured
                return
            if len(logs) >= wanted:
                self.stop_reason = StopReason.narrow_enough
                return
            is_first = num_before < 0  # each command adds one at least
            if not is_first and self.seconds_per_block > progress.seconds_of_budget_left:
                self.stop_reason = StopReason.budget_spent
                return
            progress.expects(2 * (wanted - len(logs)))
            yield block
            now = resume_state(self.plan, (), self.settings, self.code, runner.records)
            repeated = repeated_runs(block, runner.records, now)
            if repeated and not self.is_self_test:
                yield repeated
            num_before = len(logs)

    def _looks(
        self, runner: BlockRunner, state: ResumeState, progress: Progress
    ) -> Iterator[Block]:
        """Yield a look at each setting, where there is none, and note how far apart they are."""
        looks = list(look_blocks(self.plan, state, self.settings))
        for number, look in enumerate(looks):
            progress.expects(len(looks) - number)
            yield look
        now = resume_state(self.plan, runner.earlier, self.settings, self.code, runner.records)
        self.slowdown = now.looks.get(self.variant, 0.0)
        typed = any(has_typed_blocks(entry) for entry in self.plan.entries.values())
        most = self.settings.prune_slowdown
        is_far = most and max(self.slowdown, 1 / (self.slowdown or 1)) > most
        if is_far and not typed and not self.log_ratios():
            self.stop_reason = StopReason.far_apart

    def _used(self) -> DataFrame:
        """Return the runs that count for the two cells, one row each."""
        runs = DataFrame([r for r in self._rows() if r["block"] not in self._left_out_blocks])
        return as_self_test(runs) if self.is_self_test else runs

    def _rows(self) -> list[dict[str, Any]]:
        """Return the runs of the code as it is now: the blocks of one interval are of one code."""
        stored = (run for cell_id in self.plan.entries for run in self.store.runs(cell_id))
        torch_version = self.code["packages"]["torch"]
        usable = usable_runs(stored, self.plan, torch_version, accepts_any_code=False)
        return [run.row() for run in usable.own]


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """How two settings compare.

    Attributes:
        a: the setting in the numerator, in words.
        b: the setting in the denominator.
        comparison: ratio of throughputs A / B with its 95 % interval, blocks, and claim.
        stop_reason: why no further block was measured.
        sentences: result and stopping in words.
        folder: where the runs are.
    """

    a: str
    b: str
    comparison: Comparison
    stop_reason: StopReason
    sentences: tuple[str, ...]
    folder: Path

    @property
    def ratio(self) -> float:
        """Throughput of A over that of B; NaN where nothing was measured."""
        return self.comparison.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the ratio; NaN where there are too few blocks."""
        return self.comparison.low, self.comparison.high

    @property
    def claim(self) -> str:
        """`faster`, `slower`, `no difference shown` or `too few blocks`: A against B."""
        return self.comparison.claim

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)


@contextmanager
def compared_settings(
    planned: PlannedPair, console: Console
) -> Iterator[tuple[PairedComparison, ComparisonResult]]:
    """Measure blocks of two settings in turns; the sweep stays locked until the `with` block ends."""
    with measured_pair(planned, console) as pair:
        a, b = planned.request.names
        result = pair.result
        yield (
            pair,
            ComparisonResult(
                a=a,
                b=b,
                comparison=result,
                stop_reason=pair.stop_reason,
                sentences=tuple(_sentences(pair, result)),
                folder=pair.store.root,
            ),
        )


def _sentences(pair: PairedComparison, result: Comparison) -> Iterator[str]:
    a, b = pair.request.names
    wanted = f"+- {100 * pair.request.width:.3g} %"
    if result.num_blocks:
        yield result.sentence(a, b)
    elif pair.slowdown:
        yield f"{a} is {one_look(1 / pair.slowdown, f' than {b}')}."
    reached = f"+- {100 * result.half_width:.2g} %" if result.low == result.low else "still unknown"
    if pair.stop_reason is StopReason.narrow_enough:
        yield f"The interval is {reached}; {wanted} was asked for."
    elif pair.stop_reason is StopReason.far_apart:
        yield "`measurement.blocks=5` at the end of the command measures both in full."
    elif pair.stop_reason is StopReason.budget_spent:
        more = blocks_wanted(pair.log_ratios(), pair.request.width) - result.num_blocks
        minutes = max(1, round(more * pair.seconds_per_block / 60))
        yield (
            f"The budget of {pair.request.minutes:g} min is spent and the interval {reached}, not "
            f"{wanted}: about {count(more, 'more block')} ({minutes} min); the same command continues."
        )
    elif pair.stop_reason is StopReason.interrupted:
        yield "Stopped. What was measured is kept; the same command continues."
    else:
        yield "Not every block measured both settings: see the status above."
