"""`hydra/launcher=allocation`: an agent on each node, started by whatever starts processes there."""

import hashlib
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt
from rich.console import Console

from vitsweep.console import interrupts_to, print_lines
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.code_hash import package_hash
from vitsweep.files import make_folder, read_text, remove, write_atomically
from vitsweep.interpreters import command_of
from vitsweep.job_environment import hosts_in, node_name, scheduler_job
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.launchers.local import Lifetime, launch
from vitsweep.launchers.nodes.transport import (
    LOOPBACK,
    SECONDS_TO_CONNECT,
    AgentListener,
    Nodes,
    own_addresses,
    write_key,
)
from vitsweep.launchers.slurm.submit.sbatch import is_passed_on
from vitsweep.planning.freeze import command_line
from vitsweep.rates.profile import device_name
from vitsweep.results.provenance import plain_text
from vitsweep.results.store import Store
from vitsweep.spec.from_yaml import section_from_tree
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import count

STARTERS = {
    "ssh": "ssh -o BatchMode=yes {host}",
    "srun": "srun --overlap -N1 -n1 -w {host} --cpu-bind=none",
    "mpirun": "mpirun --host {host} -n 1 --bind-to none",
    "blaunch": "blaunch {host}",
    "pbsdsh": "pbsdsh -n {index} --",
}
"""Commands that start a process on a node: its name, and the index of its first line in the list of nodes."""
KEY = "VITSWEEP_AGENT_KEY"
"""Variable with the secret of the key, where the agents are started by something else."""
STARTED = "VITSWEEP_AGENT_STARTED"
"""Variable that is set where the command starts the agent: the digest of its key."""
OF_ONE_NODE = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|OMPI|PMI|PMIX)_.*|HOSTNAME|PWD|TMPDIR|TMP|TEMP|TERM"
)
"""Variables of the first node that others have of their own."""
END_OF_JOB = re.compile(r"(qdel|bkill|scancel) [\w.\[\]-]+")
SECONDS_TO_END = 10.0
"""How long agents may take to end, and a starter that has ended to have its agent connect."""


HOST_LISTS: dict[str, Callable[[str], list[str]]] = {
    "PBS_NODEFILE": lambda path: Path(path).read_text(encoding="utf-8").split(),
    "LSB_MCPU_HOSTS": lambda counted: counted.split()[::2],  # `a 4 b 4`
    "LSB_HOSTS": str.split,
    "SLURM_JOB_NODELIST": hosts_in,
}
"""Variables of schedulers -> the hosts that their value names."""


def hosts_of_job() -> list[str]:
    """Return the hosts that a scheduler gave to this job, one per line of its list; [] outside of a job."""
    for name, hosts_of in HOST_LISTS.items():
        if (value := os.environ.get(name)) is None:
            continue
        why = "names no node: it is empty"
        try:
            if value.strip() and (hosts := hosts_of(value)):
                return hosts
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        raise VitsweepError(
            f"`${name}={value}` {why}: name the nodes (`hydra.launcher.hosts=[a,b]`), or unset it outside of "
            "a job."
        )
    return []


@dataclass(frozen=True, kw_only=True)
class AllocationSettings:
    """Everything in conf/hydra/launcher/allocation.yaml, where each field is explained."""

    start: Literal["ssh", "srun", "mpirun", "blaunch", "pbsdsh", "none"]
    start_args: tuple[str, ...]
    hosts: tuple[str, ...] | None
    minutes: Annotated[float, Gt(0)] | None


class Allocation:
    """The nodes on which a command runs cells, from the first of them.

    Args:
        fields: everything in the launcher's YAML.

    Raises:
        BadValueError: a field is wrong, or nothing says which nodes there are.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._began = time.monotonic()
        self.settings: AllocationSettings = section_from_tree(
            AllocationSettings, fields, "hydra.launcher"
        )
        typed = self.settings.hosts or ()
        if len({*typed} - {""}) < len(typed):
            raise BadValueError(
                f"`hydra.launcher.hosts=[{','.join(typed)}]` must name each node once, and none by an empty "
                "name: leave the others out."
            )
        self.lines: dict[str, int] = {}
        for index, host in enumerate(typed or hosts_of_job()):
            self.lines.setdefault(host, index)
        if not self.lines:
            raise BadValueError(
                "`hydra/launcher=allocation` knows no nodes: type it in a job of PBS, LSF or Slurm, or name "
                "them (`hydra.launcher.hosts=[a,b]`)."
            )

    def machine(self) -> Machine:
        """Return this node, of which there are so many."""
        return replace(Machine.here(), nodes=len(self.lines))

    def launch(self, request: LaunchRequest) -> AbstractContextManager[LaunchResult]:
        """Measure what is missing, on the nodes.

        Raises:
            BadValueError: this host is none of them.
        """
        names, minutes, job = self.names(), self.settings.minutes, scheduler_job()
        place = {"host": names[0], "job": job}
        request = replace(request, facts={**request.facts, "allocation": place})
        lifetime = Lifetime()
        if minutes:
            lifetime = Lifetime(self._began + 60 * minutes, f"hydra.launcher.minutes={minutes:g}")
        return launch(request, partial(self._opened, names, request.console), lifetime)

    def names(self) -> list[str]:
        """Return the nodes, this one first."""
        hosts, own = list(self.lines), {node_name(), socket.gethostname(), socket.getfqdn()}

        def is_own(host: str) -> bool:  # by its short name, unless the domains differ
            alike = [name for name in own if name.split(".")[0] == host.split(".")[0]]
            known = [name for name in alike if "." in name] or alike
            return any(
                f"{n}.".startswith(f"{host}.") or f"{host}.".startswith(f"{n}.") for n in known
            )

        ours = (own.__contains__, is_own, lambda h: own_addresses([h]))
        here = next((host for fits in ours for host in hosts if fits(host)), None)
        if here is None:
            raise BadValueError(
                f"This host (`{socket.gethostname()}`) is none of the nodes {', '.join(hosts)}, and the "
                f"command runs on the first: `{self._typed_on(hosts[0])}`."
            )
        return list(dict.fromkeys([here, *hosts]))

    def _typed_on(self, host: str) -> str:
        """Return what to type for the same command on a node."""
        typed = f"cd {shlex.quote(os.getcwd())} && {command_line()}"
        start = "ssh" if self.settings.start == "none" else self.settings.start
        words = typed if start == "ssh" else f"sh -c {shlex.quote(typed)}"
        return f"{shlex.join(self._prefix(start, host))} {shlex.quote(words) if start == 'ssh' else words}"

    def _prefix(self, start: str, host: str) -> list[str]:
        words = (word.format(host=host, index=self.lines[host]) for word in STARTERS[start].split())
        first, *others = words
        return [first, *self.settings.start_args, *others]

    @contextmanager
    def _opened(
        self, names: Sequence[str], console: Console, store: Store, facts: Mapping[str, Any]
    ) -> Iterator[Nodes]:
        """Start an agent on each node; end them when the block ends.

        Raises:
            VitsweepError: one does not connect, or is of an unlike node.
        """
        folder = make_folder(store.root.absolute() / "agents")
        folder.chmod(0o700)  # agents run what lies there
        remove(folder / "key")
        starters, start = list[Starter](), self.settings.start
        with ExitStack() as at_end:
            at_end.callback(remove, folder / "key")  # which ends agents that are not connected yet
            shared = shared_key(folder.parent) if start == "none" else ""
            key = (shared or write_key(folder / "key")).encode()
            addresses = names[:1] if len(names) > 1 else [LOOPBACK]
            script = folder / "agent.sh"
            write_atomically(script, _script(store, len(names), addresses[0], key, bool(shared)))
            listener = AgentListener(names, addresses, key)
            at_end.callback(listener.close)
            interrupts = list[object]()
            with interrupts_to(lambda *given: interrupts.append(given)):  # none between two lines
                for index, name in enumerate(names if start != "none" else names[:1]):
                    prefix = self._prefix(start, name) if index else []
                    path = shlex.quote(str(script)) if start == "ssh" and index else str(script)
                    words = [*prefix, "/bin/sh", path, str(index)]
                    starters.append(Starter(words, folder / f"{index}.log"))
                    at_end.callback(starters[-1].end, 0)
            if interrupts:
                raise KeyboardInterrupt

            def last_words(index: int, is_late: bool) -> str:
                return starters[index].last_words(is_late) if index < len(starters) else ""

            def waits_for(missing: Mapping[int, str]) -> None:
                lines = [f"Waiting for the agents of {', '.join(missing.values())}."]
                for index in range(len(starters), len(names)) if start == "none" else ():
                    words = (str(folder.parent), "--index", str(index), "--nodes", str(len(names)))
                    typed = shlex.join(["python", "-P", "-m", "vitsweep", "agent", *words])
                    if index in missing:
                        lines.append(
                            f"On {names[index]}: `{typed} --first {shlex.quote(names[0])}`"
                        )
                print_lines(console, lines)

            agents = listener.accept_agents(SECONDS_TO_CONNECT, last_words, waits_for)
            _require_alike(names, [hello for hello, _ in agents])
            if (num_machines := len({hello.get("machine") for hello, _ in agents})) < len(names):
                console.print(
                    f"The {len(names)} nodes are {count(num_machines, 'machine')}: nodes that share cores or "
                    "GPUs say nothing about scaling."
                )
            # not in the private folder: ranks of other users write there
            nodes = Nodes(agents, folder.with_name("warm_up"), {"launcher": "allocation", **facts})
            for starter in starters:
                at_end.callback(starter.end, SECONDS_TO_END)
            at_end.callback(nodes.shut_down)
            yield nodes


class Starter:
    """A process that starts an agent; in a session of its own, so that Ctrl-C reaches the command alone.

    Args:
        words: its command.
        log: file for the output of the agent.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._log, self._ended_at = log, inf
        with open(log, "wb") as output:
            try:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise VitsweepError(
                    f"`hydra.launcher.start={words[0]}`: `{words[0]}` cannot be started here "
                    f"({error.strerror}); choose another."
                ) from error

    def last_words(self, is_late: bool) -> str:
        """Return the last line of its agent, late or some seconds after its end; exit codes say nothing."""
        if self._process.poll() is not None:
            self._ended_at = min(self._ended_at, time.monotonic())
        if not is_late and time.monotonic() < self._ended_at + SECONDS_TO_END:
            return ""
        lines = read_text(self._log).strip().splitlines() or ["it said nothing"]
        return f"{lines[-1]}, see `{self._log}`"

    def end(self, seconds: float) -> None:
        """Wait until it has ended, for so long; then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def shared_key(sweep: Path) -> str:
    """Return the key of a sweep by the variable, "" without one; nodes may mount its folder elsewhere."""
    secret = os.environ.get(KEY)
    return f"{secret} {Path(os.path.abspath(sweep)).name}" if secret else ""


def _script(store: Store, num_nodes: int, first: str, key: bytes, is_shared: bool) -> str:
    """Return the script that starts an agent where no environment is passed on; $1 is the node's index."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.isidentifier() and is_passed_on(name, value) and not OF_ONE_NODE.fullmatch(name)
    }
    words = (str(store.root.absolute()), "--nodes", str(num_nodes), "--first", first)
    agent = shlex.join(command_of("vitsweep", "agent", *words))
    exports = (
        f"export {n}={shlex.quote(v)}"
        for n, v in {**passed, STARTED: hashlib.sha256(key).hexdigest()}.items()
    )
    own_key = [] if is_shared else [f"unset {KEY}"]  # of the node, where a shell sets it
    place = f"cd {shlex.quote(os.getcwd())}"
    return "\n".join([place, *exports, *own_key, f'exec {agent} --index "$1"', ""])


def refuse_to_cancel(store: Store) -> None:
    """Say what ends a command that measures on an allocation: no other process can.

    Raises:
        VitsweepError: there is one.
    """
    place = (store.commands() or [{}])[-1].get("allocation")
    if not isinstance(place, dict) or not store.is_locked():
        return
    job, host = str(place.get("job")), plain_text(str(place.get("host")))
    ends = f"`{job}` ends its job, or " if END_OF_JOB.fullmatch(job) else ""
    raise VitsweepError(
        f"A command on {host} measures cells of {store.name}: {ends}Ctrl-C there ends it, and the same "
        "command continues."
    )


def node_facts() -> dict[str, Any]:
    """Return what the nodes of an allocation must have alike."""
    machine = Machine.here()
    return {
        "code": package_hash(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "cores": machine.cores_per_node,
        "GPUs": machine.devices_per_node,
        "device": device_name(machine.device),
    }


def _require_alike(names: Sequence[str], hellos: Sequence[Mapping[str, Any]]) -> None:
    """Refuse nodes that differ from the first: what they share of a cell would measure the slowest."""
    own = node_facts()
    for name, hello in zip(names, hellos, strict=True):
        unlike = [
            f"{key} {hello.get(key)}, not {own[key]}" for key in own if hello.get(key) != own[key]
        ]
        if unlike:
            raise VitsweepError(
                f"Node {name} is not like {names[0]} ({'; '.join(unlike)}), and a cell runs on like nodes "
                "with the same code: leave it out (`hydra.launcher.hosts=[...]`), or make it alike."
            )
