"""SweepPlan: the cells of one command, typed and checked, with the baselines they are divided by."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from vitsweep.composition.composer import OUTSIDE_THE_CELL, ComposedCell, Composer, Tree
from vitsweep.composition.grid import baseline_of
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.execution.code_hash import CellCode, Known, code_of
from vitsweep.spec.cell_spec import GROUPS, OPTIMIZER_FIELDS, CellSpec, flatten
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import plain_choice
from vitsweep.spec.resolve import AUTO, ranks_per_node, resolve
from vitsweep.spec.resources import HERE, Machine
from vitsweep.spec.rules import conflicts, lacking_here
from vitsweep.training.checkpoint_files import resume_conflicts

if TYPE_CHECKING:
    from pandas import DataFrame

_GROUPS = tuple(part.name for part in fields(CellSpec) if part.name != "seed")


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """One cell of a command.

    Attributes:
        composed: its overrides and the configuration composed from them.
        tree: that configuration with every `auto` resolved, as it will be frozen.
        spec: built from `tree`.
        cell_id: its hash; to compute it takes 0.1 ms, and it is read often.
        reasons: why it cannot run; empty if it can.
        baseline_id: cell by whose throughput its speedup is divided, or None.
        is_added_baseline: True where the command does not name the cell but a speedup needs it.
        known_code: files of `code` that were read, the same dict for all cells of a command.
    """

    composed: ComposedCell
    tree: Tree
    spec: CellSpec
    cell_id: str
    reasons: tuple[str, ...]
    baseline_id: str | None = None
    is_added_baseline: bool = False
    known_code: Known = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def code(self) -> CellCode:
        """Source files that can change the numbers of this cell, as the command found them."""
        return code_of(self.spec, self.known_code)


@dataclass(frozen=True)
class SweepPlan:
    """The cells of one command.

    Attributes:
        entries: cell id -> cell; first the cells that the command names, in its order, then the
            baselines that were added.
    """

    entries: dict[str, PlannedCell]

    @property
    def runnable(self) -> list[PlannedCell]:
        """Cells that can run."""
        return [entry for entry in self.entries.values() if not entry.reasons]

    @property
    def named(self) -> list[PlannedCell]:
        """Cells that the command names, in its order."""
        return [entry for entry in self.entries.values() if not entry.is_added_baseline]

    @property
    def baselines(self) -> dict[str, str | None]:
        """Cell -> baseline cell."""
        return {key: entry.baseline_id for key, entry in self.entries.items()}


def make_sweep_plan(
    composed: Sequence[ComposedCell],
    machine: Machine,
    baseline_of: Callable[[ComposedCell], ComposedCell | None],
) -> SweepPlan:
    """Resolve, type and check all cells, and add the baselines that they need.

    Raises:
        BadValueError: a value is wrong; all wrong values of all cells are named.
    """
    entries: dict[str, PlannedCell] = {}
    problems: list[str] = []
    known: Known = {}
    ranks = [ranks_per_node(cell.tree["resources"], machine) for cell in composed]
    machine = replace(machine, most_ranks=max((r for r in ranks if type(r) is int), default=0))
    for cell in composed:
        try:
            entry = plan_cell(cell, machine, known)
        except BadValueError as error:
            problems += str(error).splitlines()
            continue
        if (other := entries.setdefault(entry.cell_id, entry)) is not entry:
            before = other.spec.of_command
            problems += [
                f"`{group}.{name}` is both {before[group][name]} and {value}: it makes no other cell. Type "
                "one value, or a command for each with its own `sweep.name=NAME`."
                for group, settings in entry.spec.of_command.items()
                for name, value in settings.items()
                if before[group][name] != value
            ]
    if problems:
        raise BadValueError("\n".join(dict.fromkeys(problems)))
    return SweepPlan(_with_start(_with_baselines(entries, machine, known, baseline_of)))


def _with_start(entries: dict[str, PlannedCell]) -> dict[str, PlannedCell]:
    """Resolve `measurement.start`: cells of one baseline start alike, spawned where one has to be."""

    def started(entry: PlannedCell) -> PlannedCell:
        if entry.spec.measurement.start != AUTO:
            return entry
        is_spawned = (entry.baseline_id or entry.cell_id) in spawned
        start: Literal["forked", "spawned"] = "spawned" if is_spawned else "forked"
        tree = entry.tree | {"measurement": entry.tree["measurement"] | {"start": start}}
        measurement = replace(entry.spec.measurement, start=start)
        return replace(entry, tree=tree, spec=replace(entry.spec, measurement=measurement))

    spawned = {
        e.baseline_id or e.cell_id for e in entries.values() if e.spec.runtime.rank_environment
    }
    return {cell_id: started(entry) for cell_id, entry in entries.items()}


def plan_of(composed: Sequence[ComposedCell], machine: Machine, composer: Composer) -> SweepPlan:
    """Type and check the cells and add their baselines.

    Raises:
        BadValueError: a value is wrong, of a cell or of `sweep.baseline`.
    """
    return make_sweep_plan(composed, machine, lambda cell: baseline_of(cell, composer))


def plan_cell(composed: ComposedCell, machine: Machine, known: Known | None = None) -> PlannedCell:
    """Resolve, type and check one cell.

    Args:
        composed: the cell.
        machine: node for which every `auto` is resolved.
        known: files of code that the command has read; read anew where not given.

    Raises:
        BadValueError: a value is wrong, or a group of the cell has no single choice.
    """
    _require_single_choices(composed)
    tree = resolve(composed.tree, machine)
    cell = cell_from_tree(tree)
    lacking = lacking_here(cell) if machine.described_by == HERE else ()
    return PlannedCell(
        composed=composed,
        tree=tree,
        spec=cell,
        cell_id=cell.cell_id,
        reasons=(
            *conflicts(cell),
            *lacking,
            *_lacking(cell, machine),
            *resume_conflicts(cell),
            *_changed_model(cell, composed),
            *_replaced(cell, composed),
        ),
        known_code={} if known is None else known,
    )


def _lacking(cell: CellSpec, machine: Machine) -> Iterator[str]:
    """Yield why an allocation is too small for a cell, which is never shrunk, or its GPUs too old."""
    if cell.resources.nodes > machine.nodes:
        yield (
            f"`resources.nodes={cell.resources.nodes}` is more than the {machine.nodes:g} of the "
            f"allocation: use `resources.nodes={machine.nodes:g}`, or a larger one."
        )
    if machine.has_tf32 is False and getattr(cell.precision, "tf32", False):
        yield (
            f"`precision={cell.precision.name}` multiplies float32 as TF32, which GPUs have from Ampere on, "
            f"and those of {machine.described_by} do not: use `precision=fp32`."
        )


def _changed_model(cell: CellSpec, composed: ComposedCell) -> Iterator[str]:
    """Yield a reason for each choice that `sweep.keep_model=true` leaves out."""
    if not composed.tree.get("sweep", {}).get("keep_model", False):
        return
    for group in GROUPS:
        technique = getattr(cell, group)
        if technique.changes_model:
            yield (
                f"`{group}={technique.name}` changes what the model computes, and `sweep.keep_model=true` "
                "leaves such choices out."
            )


def _replaced(cell: CellSpec, composed: ComposedCell) -> Iterator[str]:
    """Yield a reason for each typed setting of the optimizer that the recipe would replace unseen."""
    for text in composed.overrides if cell.task.epochs else ():
        key, _, value = text.lstrip("+").partition("=")
        name = key.removeprefix("optimizer.")
        if name in OPTIMIZER_FIELDS and key != name and getattr(cell.recipe, name) is not None:
            yield (
                f"`{key}={value}` would have no effect on the training, in which `recipe={cell.recipe.name}` "
                f"sets {getattr(cell.recipe, name):g}: use `recipe.{name}={value}`, or "
                f"`recipe.{name}=null` to train with the optimizer's own."
            )


def _require_single_choices(composed: ComposedCell) -> None:
    """Refuse `~precision` and `precision=[O1,O2]`: a cell has one choice of every group."""
    for text in composed.overrides:
        group, _, value = text.lstrip("+~").partition("=")
        if text.startswith("~") and group not in composed.tree and group in _GROUPS:
            fault = "removes a group"
        elif group in _GROUPS and value.startswith("["):
            fault = "gives a group several choices"
        else:
            continue
        raise BadValueError(
            f"`{text}` {fault}, but a cell has one choice of `{group}`: leave it out for the "
            f"default, or sweep over several with `-m {group}={value.strip('[]') or 'a,b'}`."
        )


def _with_baselines(
    entries: dict[str, PlannedCell],
    machine: Machine,
    known: Known,
    baseline_of: Callable[[ComposedCell], ComposedCell | None],
) -> dict[str, PlannedCell]:
    complete, by_key = dict(entries), {}
    for entry in entries.values():
        wanted = baseline_of(entry.composed)
        if wanted is None or entry.reasons:
            continue
        if wanted.key not in by_key:
            added = plan_cell(wanted, machine, known)
            by_key[wanted.key] = replace(added, is_added_baseline=True)
        baseline = by_key[wanted.key]
        if baseline.reasons:
            continue  # the table says that there is no baseline
        present = complete.setdefault(baseline.cell_id, baseline)
        complete[present.cell_id] = replace(present, baseline_id=present.cell_id)
        if entry.cell_id != present.cell_id and entry.composed.key == wanted.key:
            del complete[entry.cell_id]  # the baseline under another name
        elif entry.cell_id != present.cell_id:
            complete[entry.cell_id] = replace(entry, baseline_id=present.cell_id)
    return complete


def cell_labels(plan: SweepPlan) -> dict[str, str]:
    """Return cell id -> its name, the one that it has in every table and chart."""
    from vitsweep.tables.names import names_by_id

    return names_by_id(cell_table(plan))


def cell_table(plan: SweepPlan) -> "DataFrame":
    """Return one row per cell as in `cells.parquet`, with the columns that are known before a run."""
    from pandas import DataFrame  # for which no mistake waits

    return DataFrame(
        [
            flatten(e.spec) | {"cell_id": key, "baseline_cell_id": e.baseline_id}
            for key, e in plan.entries.items()
        ],
        dtype=object,
    )


def cell_settings(plan: SweepPlan) -> dict[str, dict[str, str]]:
    """Return cell id -> key -> value of the overrides that distinguish the cells of a plan.

    Where cells have the same override, `+experiment=NAME` say, their techniques distinguish them.
    """
    typed = {entry.cell_id: _overrides(entry) for entry in plan.entries.values()}
    everywhere = set.intersection(*(set(o.items()) for o in typed.values())) if typed else set()
    chosen = {cell_id: entry.composed.choices for cell_id, entry in plan.entries.items()}
    techniques = {
        cell_id: {g: str(c[g]) for g in GROUPS if g in c and c[g] != plain_choice(g)}
        for cell_id, c in chosen.items()
    }
    common = set.intersection(*(set(t.items()) for t in techniques.values())) if typed else set()
    return {
        cell_id: {
            key: value
            for key, value in (techniques[cell_id] | overrides).items()
            if (key, value) not in (everywhere if key in overrides else common)
        }
        for cell_id, overrides in typed.items()
    }


def _overrides(entry: PlannedCell) -> dict[str, str]:
    pairs = (text.lstrip("+").partition("=") for text in entry.composed.overrides)
    outside = (*OUTSIDE_THE_CELL, "hydra")
    return {key: value for key, _, value in pairs if not key.startswith(outside)}


# The error of a command of which no cell can run.


def all_refused(plan: SweepPlan) -> ImpossibleCellError:
    """Return the error that names each reason with the cells that it is about."""
    from vitsweep.tables.notes import reason_lines  # pandas, for which no mistake waits

    every = plan.entries.values()
    reasons = [reason for entry in every for reason in entry.reasons]
    if len(every) == 1:
        return ImpossibleCellError(reasons)
    settings = cell_settings(plan)
    together = [" ".join(entry.reasons) for entry in every]
    return ImpossibleCellError(reasons, reason_lines([settings[c] for c in plan.entries], together))
