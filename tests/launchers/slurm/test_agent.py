"""The agent of a node: what it reports about its ranks to the first one."""

import multiprocessing
import re
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from vitsweep.execution.outcome import RankEnd
from vitsweep.execution.rank_processes import LocalRanks
from vitsweep.execution.run_request import RunRequest
from vitsweep.launchers.nodes import agent
from vitsweep.launchers.nodes.transport import Node, receive, send

SPAWN = multiprocessing.get_context("spawn")


def rank(last: Connection, rank: int, local_rank: int) -> None:
    """The first rank ends at once, the second when it receives a message."""
    if rank:
        last.recv()


class EndingWhileReported(LocalRanks):
    """Its last rank ends while the agent is reporting that it still runs."""

    end_last: Connection

    def ends(self) -> list[RankEnd]:
        found = super().ends()
        if found[0].exit_code == 0 and not self.end_last.closed:
            self.end_last.send("now")
            self.end_last.close()
            self._processes[1].join()
        return found


def test_a_rank_that_ends_during_a_report_is_in_the_next_one(tmp_path: Path) -> None:
    coordinator, connection = SPAWN.Pipe()
    end_last, last = SPAWN.Pipe()
    found = agent.Agent(connection)
    found._ranks = ranks = EndingWhileReported(SPAWN, rank, (last,), [0, 1], tmp_path)
    ranks.end_last, found._run_id = end_last, "run"
    found.report()
    threading.Thread(target=found.serve, daemon=True).start()
    deadline, report = time.monotonic() + 60, dict[str, Any](running=True, ends=[])
    while report["running"] and time.monotonic() < deadline:
        message = receive(coordinator)  # heartbeats arrive all the time
        report = report if "do" in message else message
    assert [end["exit_code"] for end in report["ends"]] == [0, 0]
    send(coordinator, {"do": "shut_down"})


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_agent_that_cannot_begin_a_run_says_why_and_its_node_is_lost(
    is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, connection = SPAWN.Pipe()
    thread = threading.Thread(target=agent.Agent(connection, "b").serve, daemon=True)
    thread.start()

    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "results")

    why = "`.*cell.yaml` is missing"
    if not is_missing:
        monkeypatch.setattr(agent, "read_cell", denied)
        why = ".*denied: 'results'"
    request = RunRequest(
        sweep_folder=tmp_path / "unseen", cell_id="c", run_id="run-1", block="b", position=0
    )
    node = Node("b", coordinator)
    node.send({"do": "run", "run": "run-1", "request": request.plain(), "ranks": [1]})
    while not node.report:
        node.receive()
    assert (node.report["run"], node.report["running"]) == ("run-1", False)
    [end] = node.report["ends"]
    assert re.match(f"Node b cannot begin this run: {why}", end["lost"])
    assert re.match(rf"Node b was lost: it cannot begin a run \({why}", node.lost)
    thread.join(60)
    assert not thread.is_alive()
