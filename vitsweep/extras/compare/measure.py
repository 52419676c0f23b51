"""Two settings in turns: a sweep of two cells that ends where their interval is narrow enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from html import escape
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep import extras
from vitsweep.api.functions import console_for
from vitsweep.api.session import Overrides, as_overrides
from vitsweep.api.sweep import Sweep
from vitsweep.errors import BadValueError, ExitCode, SweepStopped, VitsweepError
from vitsweep.extras.compare.comparison import Comparison, blocks_wanted, compared_cells
from vitsweep.extras.compare.pair import (
    DEFAULT_MINUTES,
    DEFAULT_WIDTH,
    ComparisonRequest,
    PairRounds,
    PlannedPair,
    plan_pair,
)
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.planning.blocks import Block, seconds_of_block
from vitsweep.report.answer import MOST_BLOCKS
from vitsweep.tables.formatting import count
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import screened
from vitsweep.tables.sweep_tables import SweepTables


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
) -> Iterator[tuple[LaunchResult, ComparisonResult]]:
    """Measure blocks of two settings in turns; the sweep stays locked until the `with` block ends.

    Raises:
        VitsweepError: the sweep folder cannot be used; nothing has run.
    """
    if planned.defaults:
        console.print(planned.defaults)
    plan, settings = planned.plan, planned.settings
    asked = LaunchRequest(
        plan=plan,
        machine=planned.on.machine,
        settings=settings,
        console=console,
        rounds=partial(PairRounds, planned),
        facts=planned.facts,
    )
    with planned.on.launch(asked) as launched:
        a, b = planned.request.names
        reason = _stop_reason(launched)
        result = compared_cells(SweepTables.of(launched.store).every_run, *planned.cells)
        yield (
            launched,
            ComparisonResult(
                a=a,
                b=b,
                comparison=result,
                stop_reason=reason,
                sentences=tuple(_sentences(planned, launched, result, reason)),
                folder=launched.store.root,
            ),
        )


def _stop_reason(launched: LaunchResult) -> StopReason:
    if launched.interrupted:
        return StopReason.interrupted
    if launched.state.not_measured or launched.cut_short:
        return StopReason.not_measured
    if launched.state.pruned:
        return StopReason.far_apart
    return StopReason.budget_spent if launched.state.missing_blocks else StopReason.narrow_enough


def _sentences(
    planned: PlannedPair, launched: LaunchResult, result: Comparison, reason: StopReason
) -> Iterator[str]:
    (a, b), width = planned.request.names, planned.request.width
    wanted = f"+- {100 * width:.3g} %"
    if result.num_blocks:
        yield result.sentence(a, b)
    elif slowdown := launched.state.slowdowns.get(planned.cells[0]):
        yield f"{a} is {screened(1 / slowdown, b)}."
    reached = f"+- {100 * result.half_width:.2g} %" if result.low == result.low else "still unknown"
    if reason is StopReason.narrow_enough:
        yield f"The interval is {reached}; {wanted} was asked for."
    elif reason is StopReason.far_apart:
        yield "`measurement.blocks=5` at the end of the command measures both in full."
    elif reason is StopReason.budget_spent:
        wanted_blocks = blocks_wanted(result.log_ratios, width)
        budget = f"{planned.request.minutes:g} min"
        spent = f"The budget of {budget} is spent and the interval {reached}, not {wanted}"
        if wanted_blocks > MOST_BLOCKS:
            told = {"difference": 100 * width, "most": count(MOST_BLOCKS, "block")}
            yield f"{spent}. {say('undecidable', **told)}"
            return
        more = max(wanted_blocks - result.num_blocks, 1)
        block = Block("", tuple(launched.plan.entries[cell] for cell in planned.cells))
        minutes = max(1, round(more * seconds_of_block(block, launched.store.runs()) / 60))
        yield (
            f"{spent}: about {count(more, 'more block')} ({minutes} min); the same command continues."
        )
    elif reason is StopReason.interrupted:
        yield "Stopped. What was measured is kept; the same command continues."
    else:
        yield "Not every block measured both settings: see the status above."


def compare(
    a: Overrides | Sweep,
    b: Overrides | Sweep,
    overrides: Overrides = (),
    *,
    width: float = DEFAULT_WIDTH,
    minutes: float = DEFAULT_MINUTES,
    config_dir: str | Path | None = None,
    show: bool = True,
    **settings: Any,
) -> ComparisonResult | DataFrame:
    """Measure two settings in turns on this machine, or compare two measured sweeps.

    Args:
        a: overrides of the first setting, such as `"precision=O1"` (empty for the default), or a
            sweep.
        b: the same of the second, by whose throughput the first one's is divided.
        overrides: of both settings.
        width: stop when the 95 % interval of the ratio is at most +- this, relative.
        minutes: start no block that would end later than this; the first always runs.
        config_dir: with choices of your own, of both settings.
        show: print progress and notices.
        settings: of both settings, by name.

    Returns:
        A `ComparisonResult`; of two sweeps the table of their cells, with `change`, the ratio of the
        speedup in B to that in A, its interval and claim.

    Raises:
        VitsweepError: a setting is wrong or cannot run, or one side is a sweep and the other not.
        KeyboardInterrupt: the user stopped it; the same call continues.
    """
    if isinstance(a, Sweep) and isinstance(b, Sweep):
        return extras.option("vitsweep.compare of two sweeps")(a._tables, b._tables)
    if isinstance(a, Sweep) or isinstance(b, Sweep):
        raise VitsweepError(
            "`compare` takes two settings such as 'precision=O1', or two sweeps of `vitsweep.load`."
        )
    request = ComparisonRequest(
        variant=tuple(as_overrides(a, {})),
        baseline=tuple(as_overrides(b, {})),
        common=tuple(as_overrides(overrides, settings)),
        width=_positive("width", width, 0.99),
        minutes=_positive("minutes", minutes),
        config_dir=str(config_dir) if config_dir else None,
    )
    with compared_settings(plan_pair(request), console_for(show)) as (_, result):
        pass
    if result.stop_reason is StopReason.interrupted:
        raise SweepStopped
    return result


def _positive(name: str, value: Any, most: float = inf) -> float:
    """Return an argument as a float.

    Raises:
        BadValueError: it is no number above 0, or above `most`.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    if not 0 < number <= most:
        rule = "" if most == inf else f", and {most} at most: 5 % is 0.05"
        raise BadValueError(f"`{name}={value!r}` must be a number above 0{rule}.")
    return number
