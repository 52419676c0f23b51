"""Why one cell is faster than another: traced blocks are measured where they lack, and taken apart."""

from dataclasses import dataclass

from rich.console import Console

from vitsweep.api.functions import StopReason, compared_settings
from vitsweep.composition.overrides import value_override
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.explain.causes import explain_cells
from vitsweep.extras.explain.explained import Explained, explain_stored
from vitsweep.planning.pair import (
    DEFAULT_MINUTES,
    ComparisonRequest,
    cells_named,
    plan_pair,
    with_cells,
)
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.tables.sweep_tables import SweepTables

DEFAULT_BLOCKS, DEFAULT_STEPS = 5, 3


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """Two cells, and what is measured where their traces lack.

    Attributes:
        a: overrides, or a cell or setting of `sweep`.
        b: what A is compared with.
        common: overrides of both.
        sweep: name or folder; None for typed overrides, or the latest sweep where A and B are none.
        blocks: blocks with traced steps of both; 0 for as many as a sweep holds that give an interval,
            else `DEFAULT_BLOCKS`.
        steps: traced steps at the end of each run.
        minutes: budget of this command.
        config_dir: folder with more choices, or None.
    """

    a: str
    b: str
    common: tuple[str, ...] = ()
    sweep: str | None = None
    blocks: int = 0
    steps: int = DEFAULT_STEPS
    minutes: float = DEFAULT_MINUTES
    config_dir: str | None = None


def explain(request: ExplainRequest, console: Console) -> tuple[Explained, StopReason | None]:
    """Say why A takes another time per step than B; blocks with traces are measured where they lack.

    Returns:
        The explanation, and why no further block was measured; None where nothing was.

    Raises:
        VitsweepError: a setting is wrong, names no cell or several, or cannot run; A and B are one
            cell; or the budget ended before a block had traces of both.
    """
    pair = _comparison(request)
    if isinstance(pair, Explained):
        return pair, None
    planned = plan_pair(pair)
    if len(planned.plan.entries) == 1:
        raise BadValueError(f"`{request.a}` and `{request.b}` are the same cell.")
    with compared_settings(planned, console) as (launched, result):
        tables = SweepTables.of(launched.store)
        try:
            found = explain_cells(tables, *planned.cells, pair.names)
        except VitsweepError:
            if launched.interrupted:
                raise KeyboardInterrupt from None  # before a block had traces of both
            raise
        return Explained(found, launched.store), result.stop_reason


def _comparison(request: ExplainRequest) -> ComparisonRequest | Explained:
    """Return the blocks that are to be measured, or the explanation where they are stored."""
    traces = (
        value_override("measurement.traced_steps", request.steps),
        "sweep.prune_slowdown=null",
    )
    asked = ComparisonRequest(
        variant=tuple(request.a.split()),
        baseline=tuple(request.b.split()),
        common=(*request.common, *traces),
        minutes=request.minutes,
        config_dir=request.config_dir,
        traced_blocks=request.blocks or DEFAULT_BLOCKS,
    )
    store = cells_named(request.a, request.b, request.sweep)
    if store is None:
        return asked
    if known := explain_stored(store, request.a, request.b, request.blocks or MIN_BLOCKS):
        return known
    return with_cells(asked, store, request.a, request.b)
