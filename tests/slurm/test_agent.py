"""The agent of a node, without Slurm: what it tells the lead of its ranks."""

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vitsweep.execution.rank_processes import LocalRanks, RankEnd
from vitsweep.launchers.slurm.node.agent import _Agent
from vitsweep.launchers.slurm.node.transport import receive, send
from vitsweep.results.store import Store

SPAWN = multiprocessing.get_context("spawn")


def rank(last: Connection, rank: int, local_rank: int) -> None:
    """The first rank ends at once, the second when it is told."""
    if rank:
        last.recv()


class EndingWhileReported(LocalRanks):
    """Its last rank ends while the agent is saying that it still runs."""

    told: Connection

    def ends(self) -> list[RankEnd]:
        found = super().ends()
        if found[0].exit_code == 0 and not self.told.closed:
            self.told.send("now")
            self.told.close()
            self._processes[1].join()
        return found


def test_a_rank_that_ends_while_another_ones_end_is_told_is_not_forgotten(tmp_path: Path) -> None:
    lead, connection = SPAWN.Pipe()
    told, last = SPAWN.Pipe()
    agent = _Agent(connection, Store(tmp_path))
    agent._ranks = ranks = EndingWhileReported(SPAWN, rank, (last,), [0, 1], tmp_path)
    ranks.told, agent._run = told, "run"
    agent._report()
    threading.Thread(target=agent.serve, daemon=True).start()
    deadline, said = time.monotonic() + 60, dict[str, Any](running=True, ends=[])
    while said["running"] and time.monotonic() < deadline:
        word = receive(lead)  # beats come all the time
        said = said if "beat" in word else word
    assert [end["exit_code"] for end in said["ends"]] == [0, 0]
    send(lead, {"do": "leave"})
