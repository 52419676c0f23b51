"""Settings outside of a cell's id belong to the command that types them, whatever was frozen before."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.builders import of_present_code, run
from tests.cells import GPU_NODE, LAPTOP, TINY, composer, entry
from tests.refusals import require
from vitsweep.composition.frozen import typed_words
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.run_request import frozen_document, read_cell
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, plan_of
from vitsweep.results.provenance import marked_text
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten

TRAINING = (*TINY, "task=train", "task.epochs=1", "task.keep=none", "measurement.prove=twin")
MODULE = (
    "model=module", "model.target=tests.user_modules.build", "task=train", "task.epochs=1", "task.keep=none",
    "batch.images_per_step=16",
)  # fmt: skip
MEASURED_AGAIN, SAID, FOR_LATER_RUNS = "measured again", "said", "for later runs"
SECOND = {
    "task.keep": ("task.keep=final", SAID),
    "task.held_out": ("task.held_out=tests.user_modules.confidences", SAID),
    "task.checkpoint_minutes": ("task.checkpoint_minutes=1", SAID),
    "model.twin_arguments": ("++model.twin_arguments.width=8", MEASURED_AGAIN),
    "model.twin_side_px": ("model.twin_side_px=16", MEASURED_AGAIN),
    "model.twin_batch": ("model.twin_batch=tests.user_modules.drawn_images", MEASURED_AGAIN),
    "measurement.warmup_min_seconds": ("measurement.warmup_min_seconds=9", MEASURED_AGAIN),
    "measurement.min_seconds": ("measurement.min_seconds=9", MEASURED_AGAIN),
    "measurement.max_seconds": ("measurement.max_seconds=99", FOR_LATER_RUNS),
    "measurement.blocks": ("measurement.blocks=7", MEASURED_AGAIN),
    "measurement.prove": ("measurement.prove=none", FOR_LATER_RUNS),
    "measurement.trace": ("measurement.trace=true", MEASURED_AGAIN),
    "measurement.fewest_steps": ("measurement.fewest_steps=2", SAID),
    "measurement.traced_steps": ("measurement.traced_steps=3", MEASURED_AGAIN),
    "measurement.timeout_min": ("measurement.timeout_min=99", FOR_LATER_RUNS),
    "measurement.start": ("measurement.start=spawned", SAID),
}
"""Setting -> another value of it, typed where all blocks are measured, and what happens then."""
OF_THE_MACHINE = {"resources.device", "resources.cores_per_node", "resources.devices_per_node"}
"""Nobody types them for a folder, see the tests of devices below."""


def freeze(store: Store, cell: PlannedCell, *overrides: str) -> None:
    store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, overrides, {}))


def planned(*overrides: str) -> SweepPlan:
    return plan_of(expand([*overrides, "sweep.baseline=null"], composer()), LAPTOP, composer())


def measured(cell: PlannedCell) -> list[RunRecord]:
    """All blocks of a cell, as its command typed it."""
    blocks = range(cell.spec.measurement.blocks)
    made = [run(cell.cell_id, f"b{number}", 100) for number in blocks]
    return [replace(each, spec=flatten(cell.spec)) for each in made]


def state(plan: SweepPlan, runs: list[RunRecord]) -> ResumeState:
    settings = sweep_settings(composer().compose().tree)
    return resume_state(plan, of_present_code(plan, runs), settings, "2.13.0")


def test_whatever_is_typed_second_is_what_runs_or_is_said(tmp_path: Path) -> None:
    known = set[str]()
    for number, cell in enumerate((TRAINING, MODULE)):
        [first] = planned(*cell).entries.values()
        groups = first.spec.of_command
        of_cell = {f"{group}.{name}" for group, part in groups.items() for name in part}
        known |= of_cell
        store = Store(tmp_path / str(number)).create()
        freeze(store, first)
        for key in sorted(of_cell & SECOND.keys()):
            typed, happens = SECOND[key]
            plan = planned(*(word for word in cell if not word.startswith(f"{key}=")), typed)
            [second] = plan.entries.values()
            assert second.cell_id == first.cell_id, key
            assert second.spec != first.spec, key
            store.freeze(second.cell_id, frozen_document(second.spec, second.tree, (key,), {}))
            assert read_cell(store, first.cell_id) == first.spec, f"{key}: waiting jobs go on"
            as_typed = read_cell(store, first.cell_id, second.spec.of_command)
            assert as_typed == second.spec, key
            assert typed_words(store, [first.cell_id]) == {first.cell_id: [key]}, "for `retry`"
            found = state(plan, measured(first))
            assert bool(found.missing_blocks) == (happens == MEASURED_AGAIN), key
            assert [*found.lacking.values()] == [[typed]] * (happens == SAID), key
            assert not state(plan, measured(second)).lacking, key
            if key in ("task.held_out", "task.checkpoint_minutes"):  # not what `task=train` has
                untyped = replace(second, composed=replace(second.composed, overrides=()))
                of_a_file = replace(plan, entries={second.cell_id: untyped})
                [[said]] = state(of_a_file, measured(first)).lacking.values()
                assert said.startswith(typed), "set by a file of the user's"
    assert known == SECOND.keys() | OF_THE_MACHINE


def test_one_command_gives_such_a_setting_one_value() -> None:
    with pytest.raises(BadValueError) as error:
        planned(*TRAINING, "task.keep=none,final")
    require(str(error.value), "`task.keep` none final `sweep.name=NAME`")


def test_a_training_that_ran_out_of_time_takes_the_longer_one() -> None:
    [first] = planned(*TRAINING).entries.values()
    [later] = (plan := planned(*TRAINING, "measurement.timeout_min=99")).entries.values()
    ended = [replace(each, status=Status.timed_out, metrics={}) for each in measured(first)]
    assert state(plan, ended).missing_blocks == {later.cell_id: later.spec.measurement.blocks}


def _file(store: Store, cell: PlannedCell) -> Path:
    return store.cell(cell.cell_id) / "cell.yaml"


def _swap(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    texts = _file(store, one).read_text(), _file(store, other).read_text()
    _file(store, other).write_text(texts[0])
    _file(store, one).write_text(texts[1])


def _truncate(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    _file(store, one).write_text(_file(store, one).read_text()[:300])


def _empty(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    _file(store, one).write_text("")


def _edit(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    text = _file(store, one).read_text()
    _file(store, one).write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.5"))


def _edit_with_the_mark(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    """As by a version that computed another id."""
    document = yaml.safe_load(_file(store, one).read_text())
    document.pop("mark")
    document["cell"]["optimizer"]["learning_rate"] = 0.5
    _file(store, one).write_text(marked_text(yaml.safe_dump(document, sort_keys=False)))


def _of_somebody_else(store: Store, one: PlannedCell, other: PlannedCell) -> None:
    text = _file(store, one).read_text().replace("vitsweep.techniques.layout", "antigravity")
    assert "antigravity" in text
    _file(store, one).write_text(f"{text.rpartition('mark: ')[0]}mark: '{'0' * 32}'\n")


@pytest.mark.parametrize(
    "damage", [_swap, _truncate, _empty, _edit, _edit_with_the_mark, _of_somebody_else]
)
def test_no_cell_is_measured_as_another_one(tmp_path: Path, damage: Callable[..., None]) -> None:
    one, other = cells = [entry(*TINY, "seed=1"), entry(*TINY, "seed=2")]
    store = Store(tmp_path / "sweep").create()
    for cell in cells:
        freeze(store, cell)
    of_job = Store(store.root, {one.cell_id: store.digest(one.cell_id)})
    damage(store, one, other)
    with pytest.raises(VitsweepError, match=r"cell\.yaml`"):
        read_cell(of_job, one.cell_id)
    if damage is _swap:
        with pytest.raises(VitsweepError, match=r"cell\.yaml`"):
            typed_words(Store(store.root), [one.cell_id])
    again = Store(store.root)
    for cell in cells:
        freeze(again, cell)
        digest = again.digest(cell.cell_id)
        of_worker = Store(store.root, {cell.cell_id: digest})
        assert read_cell(of_worker, cell.cell_id) == cell.spec
    assert "antigravity" not in sys.modules, "nothing of a folder is imported"
    assert again.refrozen == {c.cell_id for c in (cells if damage is _swap else [one])}
    assert read_cell(of_job, one.cell_id) == one.spec, "the same settings: a waiting job goes on"


def test_a_kept_cell_stays_byte_for_byte(tmp_path: Path) -> None:
    cell, store = entry(*TINY), Store(tmp_path / "sweep").create()
    freeze(store, cell, "seed=0")
    before = _file(store, cell).read_bytes()
    later = Store(store.root)
    later.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, ("seed=0",), {"git": "later"}))
    assert later.digest(cell.cell_id) == store.digest(cell.cell_id)
    assert _file(store, cell).read_bytes() == before
    assert not later.refrozen


def test_a_folder_holds_one_kind_of_device(tmp_path: Path) -> None:
    same = (*TINY, "resources.ranks_per_node=1", "resources.threads_per_rank=2")
    here, there = entry(*same), entry(*same, machine=GPU_NODE)
    assert (here.cell_id, here.spec.resources.device) == (there.cell_id, "cpu")
    store = Store(tmp_path / "sweep").create()
    freeze(store, here)
    later = Store(store.root)
    freeze(later, there)  # with the same overrides: it is looked at where it runs
    with pytest.raises(VitsweepError) as error:
        later.digest(there.cell_id)
    with pytest.raises(VitsweepError, match="cpu"):
        freeze(later, there, "seed=0")
    require(str(error.value), f"`{store.root}` `resources.device=cpu` `sweep.name=NAME`")
    more_cores = entry(*same, machine=replace(LAPTOP, cores_per_node=8))
    asked = read_cell(store, here.cell_id, more_cores.spec.of_command)
    assert asked.resources.cores_per_node == 8, "a fact of the machine that measures"


def test_jobs_take_the_settings_of_their_command_those_of_earlier_versions_too(
    tmp_path: Path,
) -> None:
    cell, store = entry(*TRAINING), Store(tmp_path / "sweep").create()
    freeze(store, cell)
    sha256 = store.digest(cell.cell_id)
    [second] = planned(*TRAINING[:-2], "task.keep=final", "measurement.min_seconds=9").runnable
    of_submission = {"code_hash": "c", "sha256": sha256}
    for settings, keep in (
        (second.spec.of_command, "final"),
        ({"measurement": {"min_seconds": 9.0}}, "none"),
    ):
        task = json.loads(json.dumps({"cells": {cell.cell_id: {**settings, **of_submission}}}))
        job = ArrayJob(JobArray(store.root / "jobs" / "a"), 0, task)
        found = read_cell(job.store(), cell.cell_id, job.of_command(cell.cell_id))
        assert (found.measurement.min_seconds, found.task.keep) == (9.0, keep)
