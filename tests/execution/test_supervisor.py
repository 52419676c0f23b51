"""What an interrupted run leaves for its next attempt, however its ranks end."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run
from tests.cells import cell
from vitsweep.execution.attempts import broken_off_trainings
from vitsweep.execution.outcome import EXIT_SAVED, RECORD_DRAFT
from vitsweep.execution.rank_processes import STOP_SIGNAL, LocalRanks, Ranks, fork_server
from vitsweep.execution.run_request import UNFINISHED, RunRequest, attempt_folder
from vitsweep.execution.runner import RunEnding, supervise
from vitsweep.files import append_line, write_atomically
from vitsweep.foreign import read_lines
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.checkpoint_files import (
    CHECKPOINT_FOLDER,
    INFO_FILE,
    CheckpointInfo,
    step_folder,
    write_info,
)

STEP = 7
NOTHING: dict[str, Any] = {"mesh": {}, "sharding": "ddp", "course": {}, "scaler": {}, "groups": []}
"""What else a checkpoint's info holds, which is not read here."""


def saves_and_fails_on_rank_1(folder: Path, saves: bool, rank: int, local_rank: int) -> None:
    """Wait for the stop; rank 0 leaves a whole checkpoint, rank 1 fails while it leaves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    (folder / f"ready-{rank}").touch()
    signal.sigwait({STOP_SIGNAL})
    if saves and rank == 0:
        info = CheckpointInfo(step=STEP, seconds=1.0, world_size=2, **NOTHING)
        step_folder(folder, STEP).mkdir()
        write_info(step_folder(folder, STEP), info)
    while (
        saves and not (step_folder(folder, STEP) / INFO_FILE).exists()
    ):  # as the barrier after saving
        time.sleep(0.01)
    os._exit(EXIT_SAVED if rank == 0 else 1)


def test_a_whole_checkpoint_counts_although_a_rank_fails_while_it_leaves(tmp_path: Path) -> None:
    for saves in (True, False):
        store = Store(tmp_path / str(saves))
        request = RunRequest(
            sweep_folder=store.root,
            cell_id="c",
            run_id="b-1",
            block="b",
            position=0,
            init_method="file://unused",
        )
        checkpoint = request.folder / CHECKPOINT_FOLDER
        checkpoint.mkdir(parents=True)
        arguments = (checkpoint, saves)

        def start(request: RunRequest, cell: CellSpec, arguments: Any = arguments) -> Ranks:
            ranks = range(cell.resources.world_size)
            return LocalRanks(
                fork_server(), saves_and_fails_on_rank_1, arguments, ranks, request.folder
            )

        def stop(checkpoint: Path = checkpoint) -> None:
            if len(list(checkpoint.glob("ready-*"))) == 2:
                raise RunEnding("The command was interrupted.", 60.0)

        with pytest.raises(RunEnding) as ending:
            supervise(request, cell("task=train", "sharding=fsdp"), start, stop)

        expected = STEP if saves else None
        assert ending.value.saved_step == expected
        end = list(read_lines(store.cell("c") / "attempts.jsonl"))[-1]
        assert (end["event"], end["saved_step"]) == ("end", expected)
        assert not list(store.runs())


def leaves_a_record(draft: Path, text: str, rank: int, local_rank: int) -> None:
    """End well as soon as there is a file `go`; rank 0 leaves the record of the run."""
    while not (draft.parent / "go").exists():
        time.sleep(0.01)
    if rank == 0:
        write_atomically(draft, text)


def test_a_run_that_finishes_while_its_job_is_asked_to_end_is_measured(tmp_path: Path) -> None:
    store, started = Store(tmp_path), list[Ranks]()
    request = RunRequest(
        sweep_folder=store.root, cell_id="c", run_id="b-1", block="b", position=0,
        init_method="file://unused",
    )  # fmt: skip
    record = replace(run("c", block="b"), run_id="b-1")

    def start(request: RunRequest, cell: CellSpec) -> Ranks:
        arguments = (request.folder / RECORD_DRAFT, record.to_json())
        ranks = LocalRanks(fork_server(), leaves_a_record, arguments, range(2), request.folder)
        started.append(ranks)
        return ranks

    def stop() -> None:
        request.folder.mkdir(parents=True, exist_ok=True)
        (request.folder / "go").touch()
        while started[0].running:
            started[0].wait(60)
        raise RunEnding("The job was cancelled.", 0.0)

    with pytest.raises(RunEnding) as ending:
        supervise(request, cell("sharding=ddp"), start, stop)

    assert ending.value.record == next(store.runs())
    assert [(r.run_id, r.status) for r in store.runs()] == [("b-1", Status.measured)]


def test_a_later_run_goes_on_with_trainings_that_nothing_else_continues(tmp_path: Path) -> None:
    """Killed, cancelled and timed out ones, newest first; not those of other code, nor saved ones."""
    store = Store(tmp_path)
    ends: dict[str, tuple[Status | None, int | None, str]] = {
        "killed": (Status.killed, None, "code"),
        "cancelled": (Status.killed, 12, "code"),
        "too-long": (Status.timed_out, None, "code"),
        "requeued-at-its-limit": (Status.timed_out, 9, "code"),
        "preempted": (Status.preempted, 9, "code"),
        "interrupted": (None, 9, "code"),
        "other-code": (Status.killed, None, "other"),
        "without-checkpoint": (Status.killed, None, "code"),
        "running": (None, None, "code"),
    }
    for name, (status, saved_step, code) in ends.items():
        event = {"event": "start", "run_id": name, "attempt": 1, "code_hash": code}
        append_line(store.cell("c") / "attempts.jsonl", event)
        folder = attempt_folder(store.cell("c"), name, 1) / CHECKPOINT_FOLDER
        if name != "without-checkpoint":
            step_folder(folder, 4).mkdir(parents=True)
            info = CheckpointInfo(step=4, seconds=1, world_size=1, **NOTHING)
            write_info(step_folder(folder, 4), info)
        if name != "running":
            event = {"event": "end", "run_id": name, "saved_step": saved_step}
            append_line(store.cell("c") / "attempts.jsonl", event)
        if status:
            run_id = name + (UNFINISHED if name == "killed" else "")
            store.publish(replace(run("c", status=status), run_id=run_id))

    found = [path.name for path in broken_off_trainings(store, "c", "code")]
    assert found == ["too-long.1", "cancelled.1", "killed.1"]
