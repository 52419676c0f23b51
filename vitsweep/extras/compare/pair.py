"""The two cells of a comparison, and the blocks that it measures."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from pandas import DataFrame

from vitsweep import extras
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.frozen import typed_words
from vitsweep.composition.grid import merge_overrides
from vitsweep.composition.hydra import value_override
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.execution.run_request import read_cell
from vitsweep.extras.compare.comparison import blocks_wanted, compared_cells
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.launchers.local import launch
from vitsweep.planning.blocks import Block
from vitsweep.planning.machine_defaults import with_sizes
from vitsweep.planning.pending import ResumeState, has_typed_blocks
from vitsweep.planning.rounds import BoundedGrid
from vitsweep.planning.sweep_plan import SweepPlan, make_sweep_plan
from vitsweep.rates.profile import device_name
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.results.sweeps import find_sweep, sweep_names
from vitsweep.spec.from_yaml import target_class
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import count
from vitsweep.tables.names import find_cell
from vitsweep.tables.sweep_tables import SweepTables

DEFAULT_WIDTH, DEFAULT_MINUTES = 0.05, 30.0
FOLDER = "sweep.name=compare"
"""Where the runs go unless the user says otherwise: blocks of two, separate from ordinary sweeps."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """Two settings to compare.

    Attributes:
        variant: overrides of A.
        baseline: overrides of B, which the ratio divides by.
        common: overrides of both.
        width: half of the interval that is narrow enough, relative: 0.05 is +- 5 %.
        minutes: budget of this command.
        config_dir: folder with more choices, or None.
        traced_blocks: so many blocks with traced steps are measured, whatever the width; 0 for none.
    """

    variant: tuple[str, ...]
    baseline: tuple[str, ...]
    common: tuple[str, ...]
    width: float = DEFAULT_WIDTH
    minutes: float = DEFAULT_MINUTES
    config_dir: str | Path | None = None
    traced_blocks: int = 0

    @property
    def names(self) -> tuple[str, str]:
        """A and B in words."""
        variant, baseline = (" ".join(s) or "the default" for s in (self.variant, self.baseline))
        return variant, baseline


class MeasuredOn(NamedTuple):
    """Where a comparison is measured: a node, and what launches cells there."""

    machine: Machine
    launch: Callable[[LaunchRequest], AbstractContextManager[LaunchResult]]


class PlannedPair(NamedTuple):
    """The two cells, the baseline last, the settings of their sweep, its tracker, the message on sizes."""

    plan: SweepPlan
    settings: SweepSettings
    tracker: Any
    request: ComparisonRequest
    defaults: str
    on: "MeasuredOn"

    @property
    def cells(self) -> tuple[str, str]:
        """The cells of A and B; twice the same where they are one cell."""
        cells = list(self.plan.entries)
        return cells[0], cells[-1]

    @property
    def facts(self) -> dict[str, Any]:
        """What the command's line in the store says, for the report; nothing of traced blocks."""
        names = {"names": self.request.names}
        return {} if self.request.traced_blocks else {"comparison": names}


class PairRounds(BoundedGrid):
    """A screening run of each of two cells, then blocks of both until the interval on their ratio is narrow.

    Each command adds one block at least, unless it is narrow enough already. Where cells differ by more than
    `sweep.prune_slowdown`, the screening runs are all. A cell compared with itself runs twice in each block.
    """

    def __init__(
        self,
        pair: PlannedPair,
        plan: SweepPlan,
        settings: SweepSettings,
        earlier: Sequence[RunRecord],
        code: Mapping[str, Any],
    ) -> None:
        self._pair, self._cells = pair.request, pair.cells
        self._here = device_name(plan.entries[pair.cells[0]].spec.resources.device)
        super().__init__(plan, settings, earlier, code)
        self.is_bounded = not pair.request.traced_blocks  # their number is fixed

    def _state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Compare the blocks of this machine's device with the width, or the number, that is wanted."""
        state = self._of_grid(records)
        used = self._used(records)
        here = [r.row() for r in used if (r.environment.get("device") or self._here) == self._here]
        found = compared_cells(DataFrame(here), *self._cells)
        slowdown, most = state.slowdowns.get(self._cells[0], 0.0), self._settings.prune_slowdown
        is_typed = any(map(has_typed_blocks, self._plan.entries.values()))
        is_far = bool(most) and max(slowdown, 1 / (slowdown or 1)) > (most or 0)
        pruned = frozenset(self._cells if is_far and not is_typed and not found.num_blocks else ())
        wanted = self._pair.traced_blocks or blocks_wanted(found.log_ratios, self._pair.width)
        lacking = (wanted - found.num_blocks) * (0 if pruned or state.not_measured else 1)
        runs = lacking * (2 if self._is_self_test else 1)
        missing = {self._cells[0]: runs} if runs > 0 else {}
        return replace(state, pruned=pruned, missing_blocks=missing)

    @property
    def _is_self_test(self) -> bool:
        return self._cells[0] == self._cells[1]

    def _next_blocks(self, state: ResumeState, records: Sequence[RunRecord]) -> list[Block]:
        found = super()._next_blocks(state, records)
        twice = 2 if self._is_self_test else 1
        return [replace(block, entries=twice * block.entries) for block in found]

    def _ends_in_time(self, block: Block, records: Sequence[RunRecord]) -> bool:
        is_first = all(run.is_screening for run in records)
        return is_first or super()._ends_in_time(block, records)


def cells_named(a: str, b: str, sweep: str | None) -> Store | None:
    """Return the sweep whose cells A and B are: the latest where a word is no setting; None for overrides."""
    words = [word for text in (a, b) for word in text.split()]
    is_cell = sweep is not None or any("=" not in w and not w.startswith("~") for w in words)
    return find_sweep(sweep) if is_cell else None


def sweep_first(settings: Sequence[str], sweep: str | None) -> tuple[list[str], str | None]:
    """Return settings and sweep where the first word names a sweep, as for `collect` and `export`.

    Raises:
        BadValueError: a word joins two of them.
    """
    if joining := [word for word in settings if word in ("vs", "vs.", "versus", "and", "against")]:
        raise BadValueError(
            f"`{joining[0]}` is no setting: leave it out, A and B follow each other."
        )
    is_named = sweep is None and len(settings) > 1 and settings[0] in sweep_names()
    return [*settings[is_named:]], settings[0] if is_named else sweep


def with_cells(request: ComparisonRequest, store: Store, a: str, b: str) -> ComparisonRequest:
    """Return a request of two cells of a sweep; what both of them set is common.

    Raises:
        BadValueError: a text names no cell of the sweep, or several.
    """
    cells = SweepTables.of(store).cells
    ids = [find_cell(cells, text) for text in (a, b)]
    words = typed_words(store, ids)
    apart = ("sweep.", "sweep=", "hydra", "measurement.traced_steps")
    first, second = (
        tuple(text for text in words[cell] if not text.lstrip("+~").startswith(apart))
        for cell in ids
    )
    both = () if first == second else tuple(text for text in first if text in second)
    own = [" ".join(text for text in of if text not in both) for of in (first, second)]
    typed = f"`compare {shlex.quote(own[0])} {shlex.quote(own[1])}`"
    print(
        f"Cells {ids[0]} and {ids[1]} of `{store.name}`; both have {' '.join(both)}.",
        file=sys.stderr,
    )
    here = measured_on(request).machine
    num_here = 1 if here.nodes == inf else int(here.nodes)
    for cell in (read_cell(store, each).resources for each in ids):
        if cell.nodes > num_here or cell.device != here.device:
            there = f"`hydra/launcher=allocation` inside of {cell.nodes} nodes measures them there, and "
            raise BadValueError(
                f"The cells of `{store.name}` run on {count(cell.nodes, 'node')} with `{cell.device}`, and "
                f"here {'is' if num_here == 1 else 'are'} {count(num_here, 'node')} with `{here.device}`: "
                f"{there if cell.nodes > num_here else ''}{typed} compares these settings here."
            )
    where: tuple[str, ...] = ()
    if request.traced_blocks and store.baselines().get(ids[0]) == ids[1]:
        # the pair belongs to the sweep; another would be a new one
        where = (
            value_override("sweep.folder", str(store.root.parent)),
            value_override("sweep.name", store.name),
        )
    return replace(
        request,
        variant=tuple(text for text in first if text not in both),
        baseline=tuple(text for text in second if text not in both),
        common=("machine=cpu", *both, *where, *request.common),
    )


def plan_pair(request: ComparisonRequest) -> PlannedPair:
    """Type and check the two cells of a comparison.

    Raises:
        VitsweepError: a setting is wrong or cannot run.
    """
    on = measured_on(request)
    machine = on.machine
    common = tuple(word for word in request.common if not of_launcher(word))
    request = replace(request, common=common)
    composer = Composer(hydra.open_loader(conf_dir(), request.config_dir))
    typed = [*request.common, *request.variant, *request.baseline]
    _require_single_cells(typed, composer)
    composed = [
        composer.compose(merge_overrides([(FOLDER,), request.common, setting], composer))
        for setting in (request.variant, request.baseline)
    ]
    (variant, baseline), says = with_sizes(composed, typed, composer, machine)
    if variant.tree["sweep"] != baseline.tree["sweep"]:
        raise BadValueError("`sweep.*` is one for A and B: give it after both.")
    settings = replace(sweep_settings(variant.tree), minutes=request.minutes)
    if settings.accept_code != "same":
        raise BadValueError(
            f"`sweep.accept_code={settings.accept_code}`: `compare` takes all blocks together into one "
            "interval, so that they must be of one code: leave it out."
        )
    if not settings.question:
        first, second = request.names
        settings = replace(settings, question=f"How does {first} compare with {second}?")
    plan = make_sweep_plan([variant, baseline], machine, lambda cell: baseline)
    if reasons := [reason for e in plan.entries.values() for reason in e.reasons]:
        raise ImpossibleCellError(list(dict.fromkeys(reasons)))
    most = max(entry.spec.resources.nodes for entry in plan.entries.values())
    if most > 1 and machine.nodes == inf:
        raise BadValueError(
            f"`resources.nodes={most}`: this machine is one node, and shows nothing of a network between "
            "several: leave it out, or add `hydra/launcher=allocation` inside of an allocation."
        )
    tracker = extras.tracker(variant.tree.get("tracker"))
    return PlannedPair(plan, settings, tracker, request, says(plan), on)


def of_launcher(word: str) -> bool:
    """Whether a word typed for both settings chooses or sets the launcher."""
    return word.startswith(("hydra/launcher=", "hydra.launcher."))


def measured_on(request: ComparisonRequest) -> MeasuredOn:
    """Return where the cells run: on this machine, or where the launcher that was typed runs them.

    Raises:
        BadValueError: it cannot choose blocks from those before.
    """
    words = [word for word in request.common if of_launcher(word)]
    if not words:
        return MeasuredOn(Machine.here(), launch)
    config = hydra.compose_sweep(hydra.open_loader(conf_dir(), request.config_dir), "config", words)
    name = f"hydra/launcher={hydra.choice(config, 'launcher')}"
    if not getattr(target_class(dict(config.hydra.launcher), name), "can_choose_rounds", False):
        raise BadValueError(
            f"`{name}`: `compare` chooses each block from those before, and a launcher that submits jobs "
            "cannot: type it inside of one with `hydra/launcher=allocation`, as "
            "`slurm/sweep_in_one_job.sbatch` does, or leave the launcher out."
        )
    launcher = hydra.launcher_of(config)
    return MeasuredOn(launcher.machine(), launcher.launch_cells)


def _require_single_cells(texts: Sequence[str], composer: Composer) -> None:
    """Refuse what makes several cells of one, and what chooses another launcher."""
    for override in composer.parse(texts):
        text = override.input_line
        if override.is_sweep_override():
            raise BadValueError(f"`{text}` is several settings; `compare` takes one A and one B.")
        if str(override.key_or_group).split(".")[0].split("/")[0] == "hydra":
            raise BadValueError(
                f"`{text}` belongs to both settings: type a launcher after A and B, such as "
                "`hydra/launcher=allocation`; `compare` takes nothing else of Hydra."
            )
