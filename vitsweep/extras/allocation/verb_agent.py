"""`vitsweep agent`: a node of an allocation on which something else starts the agents."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from vitsweep.cli import VERBS, Options
from vitsweep.errors import BadValueError
from vitsweep.extras.allocation.launcher import STARTED, node_facts, shared_key
from vitsweep.files import read_text
from vitsweep.job_environment import boot_id
from vitsweep.launchers.nodes.agent import run_agent


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("sweep", metavar="SWEEP_FOLDER", help="folder of the sweep")
    for option, metavar, kind, said in (
        ("--index", "I", int, "of this node, from 1; 0 is the command's own"),
        ("--nodes", "N", int, "how many nodes there are"),
        ("--first", "HOST", str, "node on which the command is typed"),
    ):
        options.add_argument(option, metavar=metavar, type=kind, required=True, help=said)


def run(arguments: Sequence[str]) -> int:
    """Follow the command on the first node; return 1 where it cannot be reached."""
    typed = VERBS["agent"].read(arguments)
    least = 0 if os.environ.pop(STARTED, "") else 1
    if not least <= typed.index < typed.nodes:
        raise BadValueError(
            f"`--index {typed.index}` must be 1 or more and below `--nodes {typed.nodes}`: the command on "
            f"`--first {typed.first}` starts the agent of its own node, 0, itself."
        )
    key = Path(typed.sweep).absolute() / "agents" / "key"

    def read_key() -> bytes:
        return (shared_key(Path(typed.sweep)) or read_text(key)).encode()

    machine = f"{socket.gethostname()} {boot_id()}"  # containers of one machine have own names
    return run_agent(typed.index, [typed.first], read_key, machine=machine, **node_facts())
