"""What the runner asks of an attempt, and what it knows from earlier runs; no rank is started."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders import run
from tests.cells import LAPTOP, entry
from tests.training.alone import ONE
from vitsweep.errors import VitsweepError
from vitsweep.execution.code_hash import CellCode, code_of
from vitsweep.execution.outcome import LOG_PART_BYTES, RankEnd
from vitsweep.execution.run_request import (
    Run,
    RunRequest,
    attempt_folder,
    earlier_folders,
    frozen_document,
    needs_warm_up,
    request_for,
)
from vitsweep.execution.runner import LocalExecutor, RunEnding, Runner, _interrupt, supervise
from vitsweep.files import append_line
from vitsweep.results.record import SCREENING, Status
from vitsweep.results.store import Store
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.training.checkpoint_files import (
    CHECKPOINT_FOLDER,
    CheckpointInfo,
    step_folder,
    write_info,
)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Runner, Any]:
    planned = entry("measurement.prove=none", *ONE, machine=LAPTOP)
    store = Store(tmp_path / "s").create()
    store.freeze(planned.cell_id, frozen_document(planned.spec, planned.tree, (), {}))
    return Runner(store, LocalExecutor(store, {"launcher": "local"})), planned


def test_the_last_proof_by_the_same_code_counts(made: tuple[Runner, Any]) -> None:
    runner, planned = made
    code = {"code_hash": "h"}
    for number, (status, proved, by) in enumerate([
        (Status.measured, "first", code), (Status.measured, "second", code), (Status.measured, "", code),
        (Status.measured, "other code", {"code_hash": "g"}), (Status.failed, "failed", code),
    ]):  # fmt: skip
        record = run(planned.cell_id, status=status, validity={"proved": proved}, environment=by)
        runner.store.publish(replace(record, run_id=f"b-{number}"))
    assert runner.proof(planned.spec, "h") == "second"
    assert replace(runner, _proved={}).proof(planned.spec, "g") == "other code"
    assert replace(runner, _proved={}).proof(planned.spec, "f") == ""
    assert runner.proof(planned.spec, "g") == "second", "it is read once"


def test_a_request_goes_on_with_earlier_attempts_of_the_same_code(made: tuple[Runner, Any]) -> None:
    runner, planned = made
    own = Run("b", 2, planned.cell_id, "b-1", SCREENING)
    code = code_of(planned.spec).hash
    start = {"event": "start", "run_id": "b-1", "name": "b-1", "attempt": 1}
    path = runner.store.cell(planned.cell_id) / "attempts.jsonl"
    append_line(path, start | {"code_hash": code})
    found = runner.request(own, planned.spec, 3)
    assert (found.run_id, found.name, found.attempt, found.position) == ("b-1-3", "b-1", 3, 2)
    assert [folder.name for folder in found.earlier] == ["b-1-2.2", "b-1.1"]
    assert found.environment["launcher"] == "local"
    assert found.environment["purpose"] == SCREENING
    assert "purpose" not in runner.request(replace(own, purpose=""), planned.spec).environment
    append_line(path, start | {"run_id": "b-1-2", "attempt": 2, "code_hash": "other"})
    assert runner.request(own, planned.spec, 3).earlier == ()
    assert runner.request(replace(own, name="a-1"), planned.spec, 2).earlier != ()


def test_code_that_was_edited_since_it_was_planned_is_refused(made: tuple[Runner, Any]) -> None:
    runner, planned = made
    own, code = Run("b", 0, planned.cell_id, "b-1"), code_of(planned.spec)
    assert runner.request(own, planned.spec, planned=code).run_id == "b-1"
    files = {**code.files} | {f"lab/{index}.py": "1" for index in range(5)}
    with pytest.raises(VitsweepError) as error:
        runner.request(own, planned.spec, planned=CellCode(files))
    assert "lab/3.py" in str(error.value)
    assert "lab/4.py" not in str(error.value)


def test_a_request_is_read_back_as_it_was_sent(tmp_path: Path) -> None:
    sent = RunRequest(
        sweep_folder=tmp_path, cell_id="c", run_id="b-1-2", block="b", position=3, attempt=2,
        proved="twin", earlier=(tmp_path / "a",), trainings=(tmp_path / "t", tmp_path / "u"),
        of_command={"measurement": {"blocks": 3}}, environment={"launcher": "local"},
    )  # fmt: skip
    assert RunRequest.from_plain(sent.plain()) == sent
    assert (sent.name, sent.folder) == ("b-1", tmp_path / "cells/c/attempts/b-1-2.2")
    assert replace(sent, attempt=1).name == "b-1-2"
    assert [Run("b", 0, "c", "n").run_id(attempt) for attempt in (1, 2, 10)] == ["n", "n-2", "n-10"]
    record = sent.record(status=Status.killed, reason="r", spec={}, metrics={}, environment={})
    assert (record.run_id, record.attempt, record.position, record.sweep) == (
        "b-1-2",
        2,
        3,
        tmp_path.name,
    )


def test_earlier_folders_are_those_of_the_attempts_before_newest_first(tmp_path: Path) -> None:
    store, own = Store(tmp_path), Run("b", 0, "c", "n")
    assert [f.name for f in earlier_folders(store, own, 3)] == ["n-2.2", "n.1"]
    assert earlier_folders(store, own, 1) == ()
    assert attempt_folder(tmp_path, "n-2", 2) == tmp_path / "attempts/n-2.2"


def test_a_block_is_warmed_up_where_it_compares_by_intervals() -> None:
    def of(blocks: int, epochs: int = 0) -> Any:
        return SimpleNamespace(
            measurement=SimpleNamespace(blocks=blocks), task=SimpleNamespace(epochs=epochs)
        )

    enough, few = MIN_BLOCKS, MIN_BLOCKS - 1
    for cells, is_needed in (
        ([of(enough), of(enough)], True), ([of(few), of(few)], False), ([of(enough)], False),
        ([of(enough), of(enough, epochs=1)], False), ([of(few), of(enough)], False), ([], False),
    ):  # fmt: skip
        assert needs_warm_up(cells) is is_needed


class Ended:
    """Ranks that have ended with these exit codes."""

    running, failed = False, False

    def __init__(self, codes: list[int], leaves: Any = lambda: None) -> None:
        self.codes, self.leaves, self.told = codes, leaves, list[str]()

    def interrupt(self) -> None:
        self.told.append("interrupt")
        self.leaves()

    def kill(self) -> None:
        self.told.append("kill")

    def ends(self) -> list[RankEnd]:
        return [RankEnd(rank=rank, exit_code=code) for rank, code in enumerate(self.codes)]

    def wait(self, seconds: float) -> None:
        pass


def test_a_training_that_is_interrupted_leaves_its_newest_checkpoint(tmp_path: Path) -> None:
    request = RunRequest(
        sweep_folder=tmp_path, cell_id="c", run_id="b-1", block="b", position=0,
        earlier=(tmp_path / "earlier",), trainings=(tmp_path / "training",),
    )  # fmt: skip
    (tmp_path / "earlier" / CHECKPOINT_FOLDER).mkdir(parents=True)
    nothing: dict[str, Any] = {"mesh": {}, "sharding": "", "course": {}, "scaler": {}, "groups": []}

    def leave() -> None:
        for step in (4, 12):
            folder = step_folder(request.folder / CHECKPOINT_FOLDER, step)
            folder.mkdir(parents=True)
            write_info(folder, CheckpointInfo(step=step, seconds=1.0, world_size=1, **nothing))

    ending = RunEnding("The job ends.", 60.0)
    assert _interrupt(Ended([1]), request, ending) is None  # type: ignore[arg-type]
    assert (tmp_path / "earlier" / CHECKPOINT_FOLDER).exists(), "nothing has taken its place"
    ranks = Ended([75], leave)
    assert _interrupt(ranks, request, ending) == 12  # type: ignore[arg-type]
    assert ranks.told == ["interrupt"]
    assert not (tmp_path / "earlier" / CHECKPOINT_FOLDER).exists()


def test_a_rank_that_ignored_the_first_signal_as_it_started_is_asked_again(tmp_path: Path) -> None:
    request = RunRequest(sweep_folder=tmp_path, cell_id="c", run_id="b-1", block="b", position=0)
    ranks = Ended([75], lambda: setattr(ranks, "running", len(ranks.told) < 2))
    ranks.running = True
    assert _interrupt(ranks, request, RunEnding("It ends.", 60.0)) is None  # type: ignore[arg-type]
    assert ranks.told == ["interrupt"] * 2


@pytest.mark.parametrize(
    ("codes", "status", "is_kept"),
    [
        ([0, 0], Status.failed, False),
        ([0, -9], Status.killed, True),
        ([0, 3], Status.failed, False),
    ],
)
def test_a_checkpoint_is_kept_where_a_later_attempt_may_go_on(
    made: tuple[Runner, Any], codes: list[int], status: Status, is_kept: bool
) -> None:
    """Without a draft of rank 0 a run whose ranks ended well has failed."""
    runner, planned = made
    request = request_for(runner.store, Run("b", 0, planned.cell_id, "b-1"))
    (request.folder / CHECKPOINT_FOLDER).mkdir(parents=True)
    (request.folder / "rank0.log").write_bytes(bytes(3 * LOG_PART_BYTES))
    ranks = Ended(codes)
    record = supervise(request, planned.spec, lambda *_: ranks)  # type: ignore[arg-type, return-value]
    assert (record.status, record.failed_rank) == (status, codes[1] and 1)
    assert (request.folder / CHECKPOINT_FOLDER).exists() is is_kept
    assert (request.folder / "rank0.log").stat().st_size < 2.1 * LOG_PART_BYTES, (
        "of what it printed"
    )
    *_, start, end = runner.store.lines(planned.cell_id, "attempts.jsonl")
    assert (start["event"], start["ranks"], start["code_hash"]) == (
        "start",
        1,
        code_of(planned.spec).hash,
    )
    assert (end["exit_codes"], end["in_time"], end["saved_step"]) == (codes, True, None)
