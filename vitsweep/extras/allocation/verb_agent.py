"""`vitsweep agent`: a node of an allocation on which something else starts the agents."""

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from vitsweep.cli import VERBS, Options
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.allocation.launcher import STARTED, node_facts, shared_key
from vitsweep.files import read_text
from vitsweep.job_environment import boot_id
from vitsweep.launchers.nodes.agent import run_agent

SECONDS_TO_SEE = 60.0
"""After which a file that another node has written is seen; file systems of networks keep what was before."""


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
    of_command = os.environ.pop(STARTED, "")
    least = 0 if of_command else 1
    if not least <= typed.index < typed.nodes:
        raise BadValueError(
            f"`--index {typed.index}` must be 1 or more and below `--nodes {typed.nodes}`: the command on "
            f"`--first {typed.first}` starts the agent of its own node, 0, itself."
        )
    if not typed.first.strip():
        raise BadValueError("`--first ''` must be the node on which the command is typed: name it.")
    path = Path(typed.sweep).absolute() / "agents" / "key"
    ends_at = time.monotonic() + SECONDS_TO_SEE

    def read_key() -> bytes:
        nonlocal ends_at
        is_over = bool(of_command) and time.monotonic() > ends_at
        try:
            key = (shared_key(Path(typed.sweep)) or read_text(path)).encode()
        except FileNotFoundError:
            if not is_over:
                raise
            key = b""
        if hashlib.sha256(key).hexdigest() == of_command:
            ends_at = 0.0
        elif is_over:
            raise VitsweepError(f"The command has ended: its key, `{path}`, is gone or another.")
        return key

    machine = f"{socket.gethostname()} {boot_id()}"  # containers of one machine have own names
    facts = {"nodes": typed.nodes, "machine": machine, **node_facts()}
    return run_agent(typed.index, [typed.first], read_key, **facts)
