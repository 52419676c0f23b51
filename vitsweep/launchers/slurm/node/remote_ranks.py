"""The ranks of one run on all nodes of a job."""

import time
from typing import Any

from vitsweep.execution.rank_processes import RankEnd
from vitsweep.launchers.slurm.node.remote_nodes import Node, Nodes


class NodeRanks:
    """The started ranks of one run.

    Args:
        nodes: of the job.
        run: name that agents repeat, so that words about an earlier run are not taken for this one.
        ranks_per_node: global ranks are numbered node by node.
        order: what each agent is told.
    """

    def __init__(self, nodes: Nodes, run: str, ranks_per_node: int, order: dict[str, Any]) -> None:
        self._nodes, self._run, self._per_node = nodes, run, ranks_per_node
        for index, node in enumerate(nodes.all):
            node.tell(order | {"run": run, "ranks": self._ranks_of(index)})

    def wait(self, seconds: float) -> None:
        """Take in what agents say."""
        self._nodes.listen(seconds)
        self._nodes.on_wait()

    @property
    def running(self) -> bool:
        """Whether a rank still runs, as far as anybody can say."""
        return any(self._runs_on(node) for node in self._nodes.all)

    @property
    def failed(self) -> bool:
        """Whether a rank ended otherwise than well, or a node is gone."""
        return bool(self._nodes.lost) or any(end.exit_code for end in self.ends())

    def interrupt(self) -> None:
        """Tell all ranks to save their training and to leave."""
        for node in self._nodes.all:
            node.tell({"do": "interrupt"})

    def kill(self) -> None:
        """End the run everywhere; a node that does not answer is given up."""
        for node in self._nodes.all:
            if self._runs_on(node):
                node.tell({"do": "kill"})
        deadline = time.monotonic() + self._nodes.kill_seconds
        while self.running and time.monotonic() < deadline:
            self._nodes.listen(0.2)

    def ends(self) -> list[RankEnd]:
        """How each rank ended, as far as agents have said."""
        return [
            end for index, node in enumerate(self._nodes.all) for end in self._ends_on(index, node)
        ]

    def _runs_on(self, node: Node) -> bool:
        return not node.lost and (node.state.get("run") != self._run or node.state["running"])

    def _ends_on(self, index: int, node: Node) -> list[RankEnd]:
        if node.state.get("run") == self._run and (not node.lost or not node.state["running"]):
            return [RankEnd(**end) for end in node.state["ends"]]
        ranks = self._ranks_of(index)
        return [RankEnd(rank=rank, exit_code=None, lost=node.lost) for rank in ranks]

    def _ranks_of(self, index: int) -> list[int]:
        return list(range(index * self._per_node, (index + 1) * self._per_node))
