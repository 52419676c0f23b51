"""Which interrupted trainings of this machine go on, and in which blocks."""

from dataclasses import replace
from pathlib import Path

from tests.builders import run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.execution.run_request import Run
from vitsweep.files import append_line
from vitsweep.launchers.local import runs_of
from vitsweep.planning.blocks import blocks_to_complete, interrupted_trainings, runs_per_cell
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.store import Store


def attempt(
    store: Store,
    cell_id: str,
    number: int,
    step: int | None,
    *,
    job: str | None = None,
    code: str = "c0ffee",
) -> None:
    """Write the life of one attempt of run `b0-x`; it saved itself after `step` steps."""
    run_id = "b0-x" if number == 1 else f"b0-x-{number}"
    common = {"run_id": run_id, "attempt": number, "job": job}
    place = {"block": "b0", "position": 1, "name": "b0-x", "code_hash": code}
    path = store.cell(cell_id) / "attempts.jsonl"
    append_line(path, {"event": "start"} | common | place)
    append_line(path, {"event": "end", "saved_step": step} | common)


def test_the_latest_saved_attempt_of_a_run_without_a_record_goes_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt(store, "cell", 1, 4)
    attempt(store, "cell", 2, 9)
    attempt(store, "cell", 3, None)  # killed without a word: what the second saved still counts
    attempt(store, "never", 1, None)
    attempt(store, "elsewhere", 1, 5, job="12_0")
    cells = dict.fromkeys(["cell", "never", "elsewhere", "new"], "c0ffee")
    [found] = interrupted_trainings(store, cells, [])
    assert found.run == Run("b0", 1, "cell", "b0-x")
    assert (found.number, found.saved_step, found.code_hash) == (3, 9, "c0ffee")
    assert interrupted_trainings(store, dict.fromkeys(cells, "other code"), []) == []
    record = run("cell", "b0", 100)
    over = type(record)(**{**vars(record), "run_id": "b0-x-3"})
    assert interrupted_trainings(store, cells, [over]) == []


def test_its_block_is_completed_by_the_cells_it_is_compared_with(tmp_path: Path) -> None:
    asked = expand([*TINY, "sharding=fsdp,zero2", "sweep.match=[model]"], composer())
    plan = plan_of(asked, LAPTOP, composer())
    fsdp, zero2, baseline = plan.entries
    store = Store(tmp_path)
    attempt(store, fsdp, 1, 3)
    [one] = interrupted_trainings(store, {fsdp: "c0ffee"}, [])
    missing = {fsdp: 2, zero2: 1, baseline: 2}
    [block] = blocks_to_complete([one], plan, missing, [run(zero2, "b0", 100)], 8)
    assert (block.name, [e.cell_id for e in block.entries]) == ("b0", [fsdp, baseline])
    [block] = blocks_to_complete([one], plan, missing, [], 8)
    assert {e.cell_id for e in block.entries} == {fsdp, zero2, baseline}


def test_a_cell_completes_no_more_interrupted_blocks_than_it_lacks(tmp_path: Path) -> None:
    asked = expand([*TINY, "sharding=fsdp,zero2", "sweep.match=[model]"], composer())
    plan = plan_of(asked, LAPTOP, composer())
    fsdp, zero2, baseline = plan.entries
    attempt(Store(tmp_path), fsdp, 1, 3)
    [one] = interrupted_trainings(Store(tmp_path), {fsdp: "c0ffee"}, [])
    both = [one, replace(one, run=replace(one.run, block="b1"))]
    missing = {fsdp: 2, zero2: 1, baseline: 2}
    blocks = blocks_to_complete(both, plan, missing, [], 8)
    members = [{e.cell_id for e in block.entries} for block in blocks]
    assert members == [{fsdp, zero2, baseline}, {fsdp, baseline}]


def test_the_interrupted_training_of_an_added_baseline_goes_on(tmp_path: Path) -> None:
    plan = plan_of(expand([*TINY, "sharding=fsdp"], composer()), LAPTOP, composer())
    fsdp, baseline = plan.entries
    attempt(Store(tmp_path), baseline, 1, 3, code=plan.entries[baseline].code.hash)

    lacking = runs_per_cell(plan, {fsdp: 1}, 8)
    hashes = {cell: plan.entries[cell].code.hash for cell in lacking}
    trainings = interrupted_trainings(Store(tmp_path), hashes, [])
    [block] = blocks_to_complete(trainings, plan, {fsdp: 1}, [], 8)
    assert (block.name, {e.cell_id for e in block.entries}) == ("b0", {fsdp, baseline})
    [(run, _)] = [r for r in runs_of([block], trainings) if r[0].name == trainings[0].run.name]
    assert (run.block, run.cell_id) == ("b0", baseline)
