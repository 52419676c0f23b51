"""Runs on this machine whose command was killed before it could write their record."""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from vitsweep.execution.outcome import RunFailure, left_a_measurement, publish
from vitsweep.execution.run_request import UNFINISHED, RunRequest, read_cell
from vitsweep.files import read_lines
from vitsweep.results.record import Status
from vitsweep.results.store import Store

KILLED = "The command that ran it was killed."


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun:
    """A run that has started and left no record.

    Attributes:
        start: its `start` event in `attempts.jsonl`.
        is_running: whether the process that started it is alive.
        is_measured: whether all its ranks ended well, so that only its record is missing.
    """

    start: dict[str, Any]
    is_running: bool
    is_measured: bool


def unfinished_runs(store: Store, cell_id: str) -> list[UnfinishedRun]:
    """Return the unfinished runs of a cell, oldest first.

    Left out are runs of a cluster's jobs, runs on other machines, and trainings that are saved: these
    continue.
    """
    events = read_lines(store.cell(cell_id) / "attempts.jsonl")
    ended = {e["run_id"] for e in events if e["event"] == "end"}
    names = {e["run_id"]: e.get("name") for e in events if e["event"] == "start"}
    saved = {names.get(e["run_id"]) for e in events if e.get("saved_step") is not None}
    here = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    return [
        UnfinishedRun(
            start=event,
            is_running=_is_alive(event["pid"], event["time"]),
            is_measured=event["run_id"] in ended,
        )
        for event in events
        if event["event"] == "start"
        and "pid" in event
        and (event["job"], event["node"]) == (None, here)
        and event["name"] not in saved
        and not any((store.cell(cell_id) / "runs").glob(f"{event['run_id']}*.json"))
        and (
            event["run_id"] not in ended
            or left_a_measurement(store.cell(cell_id), event["run_id"], event["attempt"])
        )
    ]


def record_unfinished(store: Store, cells: Iterable[str]) -> None:
    """Record the unfinished runs of some cells as killed, or measured if only the record is missing.

    The same command repeats a killed one. Should it be measured after all, its own run id is free, and
    its measurement counts.
    """
    for cell_id in cells:
        for run in unfinished_runs(store, cell_id):
            if run.is_running:
                continue
            start = run.start
            request = RunRequest(
                sweep_folder=store.root,
                cell_id=cell_id,
                run_id=start["run_id"] + ("" if run.is_measured else UNFINISHED),
                block=start["block"],
                position=start["position"],
                attempt=start["attempt"],
                init_method="",
                environment={"launcher": "local"},
            )
            failure = None if run.is_measured else RunFailure(Status.killed, KILLED)
            publish(request, read_cell(store, cell_id), failure)


def _is_alive(pid: int, since: float) -> bool:
    """Whether a process runs that began before a time: pids are used again."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
