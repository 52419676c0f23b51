"""Why one cell is faster than another: traced blocks are measured where they lack, and taken apart."""

from dataclasses import dataclass, replace

from rich.console import Console

from vitsweep.api.compare import DEFAULT_MINUTES, ComparisonRequest, StopReason, measured_pair
from vitsweep.composition.overrides import value_override
from vitsweep.errors import BadValueError
from vitsweep.report.answer import Explained, explain_stored
from vitsweep.results.provenance import code_in_overrides, require_trust
from vitsweep.results.store import Store, find_sweep
from vitsweep.tables.causes import explain_cells, find_cell
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
        blocks: blocks with traced steps of both.
        steps: traced steps at the end of each run.
        minutes: budget of this command.
    """

    a: str
    b: str
    common: tuple[str, ...] = ()
    sweep: str | None = None
    blocks: int = DEFAULT_BLOCKS
    steps: int = DEFAULT_STEPS
    minutes: float = DEFAULT_MINUTES

    @property
    def names_cells(self) -> bool:
        """Whether A and B are cells or settings of a sweep."""
        return self.sweep is not None or any(
            "=" not in word for text in (self.a, self.b) for word in text.split()
        )


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
    with measured_pair(pair, console) as measured:
        if measured.is_self_test:
            raise BadValueError(f"`{request.a}` and `{request.b}` are the same cell.")
        tables = SweepTables.of(measured.store)
        found = explain_cells(tables, measured.variant, measured.baseline, pair.names)
        return Explained(found, measured.store), measured.stop_reason


def _comparison(request: ExplainRequest) -> ComparisonRequest | Explained:
    """Return the blocks that are to be measured, or the explanation where they are stored."""
    traces = (value_override("measurement.traced_steps", request.steps),)
    asked = ComparisonRequest(
        variant=tuple(request.a.split()),
        baseline=tuple(request.b.split()),
        common=(*request.common, *traces),
        minutes=request.minutes,
        traced_blocks=request.blocks,
    )
    if not request.names_cells:
        return asked
    store = find_sweep(request.sweep)
    if known := explain_stored(store, request.a, request.b, request.blocks):
        return known
    cells = SweepTables.of(store).cells
    a, b = (find_cell(cells, text) for text in (request.a, request.b))
    where: tuple[str, ...] = ()
    if store.baselines().get(a) == b:  # the pair belongs to the sweep; another would be a new one
        where = (
            value_override("sweep.folder", str(store.root.parent)),
            value_override("sweep.name", store.name),
        )
    return replace(
        asked,
        variant=_overrides(store, a),
        baseline=_overrides(store, b),
        common=(*where, *asked.common),
    )


def _overrides(store: Store, cell_id: str) -> tuple[str, ...]:
    """Return what to type for a cell of a sweep, without settings of the sweep and of traces."""
    own = [str(text) for text in store.frozen(cell_id)["overrides"]]
    if not store.is_own_cell(cell_id):
        require_trust(store.root, code_in_overrides(own))
    apart = ("sweep.", "sweep=", "hydra", "measurement.traced_steps")
    return tuple(text for text in own if not text.lstrip("+~").startswith(apart))
