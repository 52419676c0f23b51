"""Two settings measured in turns, and two measured sweeps beside each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vitsweep.api.handle import Sweep
from vitsweep.launchers.paired_comparison import (
    ComparisonRequest,
    PairedComparison,
    StopReason,
    measured_pair,
)
from vitsweep.tables.comparison import SELF_TEST, Comparison, blocks_wanted
from vitsweep.tables.formatting import count

if TYPE_CHECKING:
    from pandas import DataFrame


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
    request: ComparisonRequest, console: Console
) -> Iterator[tuple[PairedComparison, ComparisonResult]]:
    """Measure blocks of two settings in turns; the sweep stays locked until the `with` block ends.

    Raises:
        VitsweepError: a setting is wrong or cannot run; nothing has run.
    """
    with measured_pair(request, console) as pair:
        a, b = request.names
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


def compared_sweeps(a: Sweep, b: Sweep) -> "DataFrame":
    """Return which speedups of the same cells changed from sweep A to sweep B.

    Returns:
        The table of `tables.days.changed_speedups`, one row per cell, largest change first.
    """
    from vitsweep.results.store import Store
    from vitsweep.tables.days import changed_speedups

    baselines = (Store(sweep.folder).baselines() for sweep in (a, b))
    return changed_speedups(a.runs, b.runs, *baselines)


def _sentences(pair: PairedComparison, result: Comparison) -> Iterator[str]:
    wanted = f"+- {100 * pair.request.width:.3g} %"
    if result.num_blocks:
        yield result.sentence(*pair.request.names)
    if pair.is_self_test:
        yield SELF_TEST
    reached = f"+- {100 * result.half_width:.2g} %" if result.low == result.low else "still unknown"
    if pair.stop_reason is StopReason.narrow_enough:
        yield f"The interval is {reached}; {wanted} was asked for."
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
