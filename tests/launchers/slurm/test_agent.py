"""The agent of a node: what it reports about its ranks to the first one."""

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vitsweep.execution.outcome import RankEnd
from vitsweep.execution.rank_processes import LocalRanks
from vitsweep.launchers.nodes.agent import Agent
from vitsweep.launchers.nodes.transport import receive, send

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
    agent = Agent(connection)
    agent._ranks = ranks = EndingWhileReported(SPAWN, rank, (last,), [0, 1], tmp_path)
    ranks.end_last, agent._run_id = end_last, "run"
    agent.report()
    threading.Thread(target=agent.serve, daemon=True).start()
    deadline, report = time.monotonic() + 60, dict[str, Any](running=True, ends=[])
    while report["running"] and time.monotonic() < deadline:
        message = receive(coordinator)  # heartbeats arrive all the time
        report = report if "do" in message else message
    assert [end["exit_code"] for end in report["ends"]] == [0, 0]
    send(coordinator, {"do": "shut_down"})
