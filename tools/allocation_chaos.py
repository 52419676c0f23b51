"""The faults that several nodes add: agents that die or stop, nodes that die with all that runs there."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.chaos import Chaos

TWO_OF_THREE_NODES = (
    "hydra/launcher=allocation", "hydra.launcher.hosts=[127.0.0.1,127.0.0.2,127.0.0.3]",
    "resources.nodes=2", "resources.ranks_per_node=1", "resources.threads_per_rank=1",
)  # fmt: skip
"""Cells of two nodes where there are three: the death of an agent that no cell needs ends nothing."""
SSH = Path(__file__).parents[1] / "tests" / "extras" / "allocation" / "bin"
"""Folder with what stands in for ssh."""


class AllocationChaos(Chaos):
    """Faults that strike a sweep with `hydra/launcher=allocation`, all of whose nodes are this machine."""

    @property
    def faults(self) -> Mapping[str, Callable[[], bool]]:
        """Return the faults by name; each returns whether it found something to strike."""
        own = {
            "kill agent": lambda: self.send(signal.SIGKILL, "agent"),
            "stop agent": lambda: self.stop("agent"),
            "kill node": self._kill_a_node,
        }
        return {**super().faults, **own}

    def start(self, *arguments: str, quick: bool = True) -> "subprocess.Popen[str]":
        """Start a command that finds the stand-in for ssh."""
        self.next_environment = {"PATH": f"{SSH}{os.pathsep}{os.environ['PATH']}"}
        return super().start(*arguments, quick=quick)

    def _kill_a_node(self) -> bool:
        """Kill an agent and all that it started; beside the first one, the command, too."""
        agent = self.one_of("agent")
        if agent is None:
            return False
        commands = [c for c in self._by_kind()["command"] if c == agent.parent()]
        first = commands if agent.cmdline()[-1] == "0" else []
        for process in [*first, agent, *agent.children(recursive=True)]:
            process.kill()
        return True
