#!/usr/bin/env python3
"""A real Slurm cluster on this machine, up in seconds: for tests, demos and debugging.

    python slurm/local_cluster.py install            # the one command that gets the packages
    python slurm/local_cluster.py start --nodes 4    # munge, MariaDB, slurmdbd, slurmctld, 4 x slurmd
    eval "$(python slurm/local_cluster.py env)"      # sinfo, sbatch, srun, sacct now talk to it
    python slurm/local_cluster.py kill-node 127.0.0.4
    python slurm/local_cluster.py start-node 127.0.0.4
    python slurm/local_cluster.py stop

These are Debian's own daemons, several slurmd on one host, so what works here works for the same
reason on a cluster. It needs no root (then it runs the jobs of the starting user only), no systemd,
no cgroups and no entry in /etc/hosts. What it cannot show: memory limits are not enforced, no CPUs
are bound, and all "nodes" share this machine's cores. The GPUs are fake: Slurm hands out indices
and sets CUDA_VISIBLE_DEVICES, but there is no device behind them.

Partitions: `main` (default), `high` (preempts), `scavenge` (is preempted: signal, 10 s, requeue).
Everything lives in one state folder: --state, else $VITSWEEP_CLUSTER, else a folder per user under
the temporary directory. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pwd
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKAGE_OF_COMMAND = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
ACCOUNTING_COMMANDS = {"slurmdbd", "mariadbd", "mariadb-install-db"}
APT_INSTALL = [
    # two workers of the tests may install at once: the second waits
    *("apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "--no-install-recommends"),
    *dict.fromkeys(PACKAGE_OF_COMMAND.values()),
]
SYSTEM_PATH = "/usr/sbin:/usr/local/sbin:/usr/bin:/bin"

# Below 20000: torch.distributed and submitit draw their rendezvous ports from 20000-60000, and the
# kernel its ephemeral ones from 32768 on. A daemon there would now and then meet a job's port.
BASE_PORTS = range(10_000, 19_000)
FIRST_NODE_PORT = 10
MAX_NODES = 500
LOOPBACK = "127.0.0.1"
SOCKET_PATH_LIMIT = 107  # sun_path, less its final NUL

POLICY_FILE = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# made by vitsweep's local_cluster.py for one apt run\nexit 101\n"

SERVING = ("idle", "mixed", "allocated", "planned", "completing")


class ClusterError(Exception):
    """Something the user can act on; its text is all that is printed."""


# ------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Settings:
    """What the cluster looks like; kept in the state folder so that later verbs need no options."""

    nodes: int = 4
    cpus: int = 4
    memory_mb: int = 4000
    gpus: int = 8
    prefix: str = "127.0.0."
    accounting: str = "slurmdbd"
    overrides: tuple[str, ...] = ()
    base_port: int = 0

    @property
    def names(self) -> list[str]:
        """Node names. The default ones are loopback addresses, so that they resolve everywhere.

        torch.distributed takes the first node's name as its master address; a name such as `c1`
        would have to stand in /etc/hosts, which takes root.
        """
        return [f"{self.prefix}{i}" for i in range(1, self.nodes + 1)]

    @property
    def name_range(self) -> str:
        """The names in Slurm's own notation, short enough for the longest cluster."""
        return f"{self.prefix}[1-{self.nodes}]" if self.nodes > 1 else f"{self.prefix}1"

    @property
    def with_accounting(self) -> bool:
        """Whether `sacct` will know the jobs."""
        return self.accounting == "slurmdbd"

    @property
    def slurmctld_port(self) -> int:
        """The controller's port."""
        return self.base_port

    @property
    def slurmdbd_port(self) -> int:
        """The accounting daemon's port."""
        return self.base_port + 1

    def node_port(self, node: str) -> int:
        """The port of one node's daemon: what tells the nodes of one host apart."""
        return self.base_port + FIRST_NODE_PORT + self.names.index(node)

    @property
    def ports(self) -> list[int]:
        """Every port the daemons will listen on."""
        nodes = [self.node_port(name) for name in self.names]
        return [self.slurmctld_port, self.slurmdbd_port, *nodes]

    def check(self) -> None:
        """Refuse what Slurm would only fail on later, in a log file."""
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"--nodes {self.nodes}: must be between 1 and {MAX_NODES}")
        if self.nodes > 254 and self.prefix[-1:] == ".":
            raise ClusterError("addresses end at 254: name the nodes, for example --prefix c")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", self.prefix):
            raise ClusterError(f"--prefix {self.prefix!r}: letters, digits, dots and hyphens only")
        if self.cpus < 1 or self.memory_mb < 1 or self.gpus < 0:
            raise ClusterError("--cpus and --memory-mb must be at least 1, --gpus at least 0")
        for line in self.overrides:
            if not re.fullmatch(r"[A-Za-z]+=[^\n]*", line):
                raise ClusterError(f"--set {line!r}: write KEY=VALUE, as in slurm.conf")


@dataclass(frozen=True)
class Host:
    """This machine as Slurm must see it."""

    name: str
    private: bool

    @classmethod
    def here(cls) -> Host:
        """Find out whether the daemons can be kept off the network.

        With NoInAddrAny Slurm binds to the address of the machine's own name. That only works
        where this is 127.0.0.1: the daemons answer to the address a connection came from, and one
        on the loopback comes from there. Elsewhere they listen everywhere; munge guards them.
        """
        name = socket.gethostname()
        with contextlib.suppress(OSError):
            return cls(name.split(".")[0], socket.gethostbyname(name) == LOOPBACK)
        return cls(name.split(".")[0], private=False)


@dataclass(frozen=True)
class Folder:
    """Where the cluster keeps its things; nothing is written anywhere else."""

    root: Path

    def __truediv__(self, name: str) -> Path:
        """Name something in the folder."""
        return self.root / name

    @property
    def conf(self) -> Path:
        """The one file a client needs."""
        return self.root / "slurm.conf"

    @property
    def settings(self) -> Path:
        """The cluster's settings; this file marks the folder as one that `stop --remove` may delete."""
        return self.root / "cluster.json"

    @property
    def munge_socket(self) -> Path:
        """A private munge, so that the machine's own is neither needed nor disturbed."""
        return self.root / "munge" / "munge.sock"

    @property
    def database_socket(self) -> Path:
        """The database's only door: it listens on no port and asks for no password."""
        return self.root / "database.sock"

    def create(self) -> None:
        """Make it, and refuse a folder that another user put there (/tmp is everybody's)."""
        self._check_path()
        self.root.mkdir(parents=True, exist_ok=True)
        if self.root.is_symlink() or self.root.stat().st_uid != os.getuid():
            raise ClusterError(f"{self.root} is not yours: choose another folder with --state")
        if any(self.root.iterdir()) and not self.settings.exists():
            raise ClusterError(f"{self.root} holds other things: name an empty folder with --state")
        for name in ("", "munge", "slurmctld", "spool", "log", "pids", "gpus"):
            (self.root / name).mkdir(exist_ok=True)
            (self.root / name).chmod(0o755)  # jobs of other users pass here, whatever the umask

    def _check_path(self) -> None:
        """Slurm's configuration knows no quoting, and sockets no long paths."""
        if not re.fullmatch(r"[\w./+-]+", str(self.root)):
            raise ClusterError(f"--state {self.root}: only letters, digits and _ . / + - will do")
        longest = max(len(os.fsencode(s)) for s in (self.munge_socket, self.database_socket))
        if longest > SOCKET_PATH_LIMIT:
            room = SOCKET_PATH_LIMIT - (longest - len(os.fsencode(self.root)))
            raise ClusterError(f"--state {self.root}: too long a path, {room} characters at most")


def user_name() -> str:
    """Whose cluster it is; the uid decides, not $USER, which survives a change of user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ClusterError(f"uid {os.getuid()} has no name here, and Slurm needs one") from None


def default_state() -> Path:
    """The folder of a user who names none: one per user, so that two users never meet."""
    named = os.environ.get("VITSWEEP_CLUSTER")
    return Path(named or Path(tempfile.gettempdir()) / f"vitsweep-cluster-{user_name()}")


# ----------------------------------------------------------------------------------- configuration


def slurm_conf(settings: Settings, folder: Folder, host: Host) -> str:
    """Write slurm.conf: keys once each, so that `--set` can replace any of them."""
    keys = {
        **_where(settings, folder, host),
        **_no_privileges(),
        **_quick_reactions(),
        **_scheduling(),
        **_accounting(settings, folder),
        **dict(line.split("=", 1) for line in settings.overrides),
    }
    lines = [f"{key}={value}" for key, value in keys.items()]
    return "\n".join([*lines, *_node_lines(settings), *_partition_lines(settings)]) + "\n"


def _where(settings: Settings, folder: Folder, host: Host) -> dict[str, object]:
    """Names, ports and paths. NoInAddrAny keeps the daemons on the loopback address."""
    user = user_name()
    bound = {"CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny"} if host.private else {}
    return {
        "ClusterName": f"local{hashlib.sha256(str(folder.root).encode()).hexdigest()[:8]}",
        "SlurmctldHost": f"{host.name}({LOOPBACK})",
        "SlurmUser": user,
        "SlurmdUser": user,
        "SlurmctldPort": settings.slurmctld_port,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job may only start again when its credential has expired: 120 s by default.
        "AuthInfo": f"socket={folder.munge_socket},cred_expire=5",
        **bound,
        "StateSaveLocation": folder / "slurmctld",
        "SlurmdSpoolDir": folder / "spool" / "%n",
        "SlurmctldPidFile": folder / "pids" / "slurmctld.own",
        "SlurmdPidFile": folder / "pids" / "slurmd.%n.own",
        "SlurmctldLogFile": folder / "log" / "slurmctld.log",
        "SlurmdLogFile": folder / "log" / "slurmd.%n.log",
    }


def _no_privileges() -> dict[str, object]:
    """Neither cgroups nor root; nodes may claim more CPUs than the machine has."""
    return {
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "SlurmdParameters": "config_overrides",
        "JobAcctGatherType": "jobacct_gather/none",
        "GresTypes": "gpu",
    }


def _quick_reactions() -> dict[str, object]:
    """What takes minutes on a cluster takes seconds here; a dead node comes back by itself."""
    return {
        "ReturnToService": 2,
        "SlurmdTimeout": 15,
        "SlurmctldTimeout": 30,
        "KillWait": 5,
        "UnkillableStepTimeout": 60,
        "BatchStartTimeout": 30,
        "MinJobAge": 3600,
        "JobRequeue": 1,
        "MaxArraySize": 10001,
        "MaxJobCount": 50000,
    }


def _scheduling() -> dict[str, object]:
    """Start jobs at once; let `high` take nodes from `scavenge` as shared clusters do.

    preempt_send_user_signal delivers the job's own --signal at preemption: submitit needs it to
    save and requeue.
    """
    return {
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,"
        "bf_interval=2,bf_continue,default_queue_depth=2000,bf_max_job_test=2000",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": 100,
        "PriorityType": "priority/multifactor",
        "PriorityWeightPartition": 1000,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",
    }


def _accounting(settings: Settings, folder: Folder) -> dict[str, object]:
    """With slurmdbd `sacct` works; without it the cluster starts in a fifth of the time.

    Then nobody but the controller knows how a job ended: stock submitit, which asks only `sacct`,
    waits for ever for a job that died without reporting an end.
    """
    if not settings.with_accounting:
        return {"AccountingStorageType": "accounting_storage/none"}
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": LOOPBACK,
        "AccountingStoragePort": settings.slurmdbd_port,
        "AccountingStoragePass": folder.munge_socket,  # yes, the socket: AuthInfo is not used here
    }


def _node_lines(settings: Settings) -> list[str]:
    """One line per node: the same address for all, told apart by their ports."""
    shape = (
        f"CPUs={settings.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={settings.cpus} "
        f"ThreadsPerCore=1 RealMemory={settings.memory_mb} State=UNKNOWN"
    )
    gpus = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    return [
        f"NodeName={name} NodeHostname={name} NodeAddr={LOOPBACK} "
        f"Port={settings.node_port(name)} {shape}{gpus}"
        for name in settings.names
    ]


def _partition_lines(settings: Settings) -> list[str]:
    """Three tiers over the same nodes, as on a shared cluster."""
    common = f"Nodes={settings.name_range} MaxTime=INFINITE DefaultTime=60 State=UP"
    tiers = {
        "main": "Default=YES PriorityTier=10 PriorityJobFactor=10 PreemptMode=OFF",
        "high": "PriorityTier=100 PriorityJobFactor=100 PreemptMode=OFF",
        "scavenge": "PriorityTier=1 PriorityJobFactor=1 PreemptMode=REQUEUE GraceTime=10",
    }
    return [f"PartitionName={name} {common} {tier}" for name, tier in tiers.items()]


def gres_conf(settings: Settings, folder: Folder) -> str:
    """Declare the fake GPUs.

    Slurm sets CUDA_VISIBLE_DEVICES only for character devices, numbered by the digits at the end
    of their names: links to /dev/null are just that, on every machine and without root.
    """
    if not settings.gpus:
        return ""
    which = f"[0-{settings.gpus - 1}]" if settings.gpus > 1 else "0"
    return f"Name=gpu File={folder / 'gpus'}/gpu{which}\n"


def slurmdbd_conf(settings: Settings, folder: Folder, host: Host) -> str:
    """Write slurmdbd.conf; `localhost` makes the database client use the socket it is given."""
    bound = {"CommunicationParameters": "NoInAddrAny"} if host.private else {}
    keys = {
        "DbdHost": host.name,
        "DbdAddr": LOOPBACK,
        "DbdPort": settings.slurmdbd_port,
        "SlurmUser": user_name(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder.munge_socket}",
        **bound,
        "LogFile": folder / "log" / "slurmdbd.log",
        "PidFile": folder / "pids" / "slurmdbd.own",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": user_name(),
        "StorageLoc": "slurm_accounting",
    }
    return "".join(f"{key}={value}\n" for key, value in keys.items())


# --------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Process:
    """A line of /proc/<pid>/stat. `started` tells a process from a later one with its pid."""

    pid: int
    state: str
    parent: int
    started: int

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """Read a process from /proc; None when it is gone."""
        try:
            fields = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            )
        except OSError:
            return None
        return cls(pid, fields[0], int(fields[1]), int(fields[19]))

    @classmethod
    def all_running(cls) -> list[Process]:
        """Every living process that can be seen."""
        pids = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
        return [process for pid in pids if (process := cls.read(pid)) and process.runs]

    @property
    def runs(self) -> bool:
        """Whether it is running; a zombie is not."""
        return self.state not in "ZX"

    def environment(self) -> dict[str, str]:
        """What it was started with; empty when that is another user's secret."""
        try:
            text = Path(f"/proc/{self.pid}/environ").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return {}
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)

    def holds(self, path: Path) -> bool:
        """Whether it has this file open."""
        with contextlib.suppress(OSError):
            return str(path) in map(link_target, Path(f"/proc/{self.pid}/fd").iterdir())
        return False


def link_target(link: Path) -> str:
    """Where a link points; nowhere if it is gone, as a file that was just closed."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def with_descendants(roots: set[int], processes: Sequence[Process]) -> set[int]:
    """The processes and all their children, however deep."""
    family = set(roots)
    while grown := {p.pid for p in processes if p.parent in family} - family:
        family |= grown
    return family


def send(pids: set[int], sig: signal.Signals) -> None:
    """Signal them; one that is already gone is what was wanted."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def until(done: Callable[[], bool], seconds: float, step: float = 0.05) -> bool:
    """Poll until it is so, or the time is over."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(step)
    return True


def accepts(address: str | tuple[str, int]) -> bool:
    """Whether somebody listens at this port or socket."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex(address) == 0


def is_free(port: int) -> bool:
    """Whether a daemon could listen on this port, on any address of the machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def with_free_ports(settings: Settings) -> Settings:
    """Keep the remembered ports if they are still free, else draw others.

    Drawn at random, so that two clusters started in the same moment hardly ever choose alike.
    """
    for _ in range(200):
        if settings.base_port and all(map(is_free, settings.ports)):
            return settings
        settings = dataclasses.replace(settings, base_port=random.choice(BASE_PORTS))
    raise ClusterError(f"no {len(settings.ports)} free ports in a row in {BASE_PORTS}")


@dataclass(frozen=True)
class Daemon:
    """One daemon: its name, the command that runs it in the foreground, when it serves."""

    name: str
    command: list[str]
    ready: Callable[[], bool] = lambda: True
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


# ----------------------------------------------------------------------------------------- cluster


class Cluster:
    """The cluster of one state folder: everything the verbs do."""

    def __init__(self, state: Path | str) -> None:
        """Describe the cluster of a folder; nothing is made before `start`."""
        self.folder = Folder(Path(os.path.abspath(state)))
        self.user = user_name()
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def settings(self) -> Settings:
        """The settings of the latest `start`."""
        try:
            kept = json.loads(self.folder.settings.read_text(encoding="utf-8"))
            return Settings(**{**kept, "overrides": tuple(kept["overrides"])})
        except FileNotFoundError:
            raise ClusterError(f"no cluster in {self.folder.root}: start one first") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"{self.folder.settings}: not understood ({error})") from None

    @property
    def exists(self) -> bool:
        """Whether one was ever started here."""
        return self.folder.settings.exists()

    @property
    def env(self) -> dict[str, str]:
        """What a client needs: Slurm's commands the first, this script's other verbs the second."""
        root = str(self.folder.root)
        return {"SLURM_CONF": str(self.folder.conf), "VITSWEEP_CLUSTER": root}

    @property
    def client_env(self) -> dict[str, str]:
        """A whole environment for a client, free of any other Slurm this shell may be part of."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_"))}
        return {**kept, **self.env, "PATH": f"{kept.get('PATH', '')}:{SYSTEM_PATH}"}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One verb at a time: two `start` in one folder would start two of everything."""
        with (self.folder / "lock").open("w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ---- start

    def start(self, **asked: Any) -> None:
        """Bring up what is not up. A folder that was stopped keeps its settings and accounting."""
        kept = self.settings if self.exists else Settings()
        wanted = dataclasses.replace(kept, **asked)
        wanted.check()
        require_packages(wanted)
        self.folder.create()
        with self.locked():
            was_running = any(map(self.alive, self.recorded()))
            self._remember(wanted, kept, was_running)
            self._prepare(self.settings)
            try:
                self._start_all()
            except BaseException:
                if not was_running:
                    self._stop_all()
                raise

    def _remember(self, wanted: Settings, kept: Settings, was_running: bool) -> None:
        """Write down the settings; a running cluster's cannot change under its jobs."""
        if was_running and wanted != kept:
            raise ClusterError("already running with other settings: stop it first")
        if not was_running:
            text = json.dumps(asdict(with_free_ports(wanted)), indent=1)
            write(self.folder.settings, text)

    def _prepare(self, settings: Settings) -> None:
        """Write every file the daemons read, and make every folder they write to."""
        host = Host.here()
        for node in settings.names:
            (self.folder / "spool" / node).mkdir(exist_ok=True)
        write(self.folder.conf, slurm_conf(settings, self.folder, host))
        write(self.folder / "gres.conf", gres_conf(settings, self.folder))
        for i in range(settings.gpus):
            with contextlib.suppress(FileExistsError):
                (self.folder / "gpus" / f"gpu{i}").symlink_to(os.devnull)
        self._make_munge_key()
        if settings.with_accounting:
            text = slurmdbd_conf(settings, self.folder, host)
            write(self.folder / "slurmdbd.conf", text, mode=0o600)
            self._make_database()

    def _make_munge_key(self) -> None:
        """A key of our own: only who can read it can forge a job of another user."""
        key = self.folder / "munge" / "munge.key"
        if not key.exists():
            fd = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with open(fd, "wb") as file:
                file.write(secrets.token_bytes(128))

    def _make_database(self) -> None:
        """Make an empty database whose one account is the starting user, known by its uid."""
        data, unfinished = self.folder / "database", self.folder / "database.new"
        if data.exists():
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [
            *("mariadb-install-db", "--no-defaults", f"--datadir={unfinished}", "--skip-test-db"),
            *("--auth-root-authentication-method=socket", f"--auth-root-socket-user={self.user}"),
            *(f"--user={self.user}", "--skip-name-resolve"),
        ]
        log = self.folder / "log" / "mariadb-install-db.out"
        with log.open("wb") as out:
            code = subprocess.call(command, stdout=out, stderr=out, env=self.client_env)
        if code:
            raise ClusterError(f"mariadb-install-db failed:\n{tail(log)}")
        unfinished.rename(data)

    def _start_all(self) -> None:
        """Start the daemons one after the other, then wait until all nodes take jobs."""
        for daemon in self.daemons():
            self._start_daemon(daemon)
        self._wait_for_nodes(set(self.settings.names))

    def _start_daemon(self, daemon: Daemon) -> None:
        """Start it unless it runs, and wait until it serves: the next one needs it."""
        if not self.alive(daemon.name):
            self._spawn(daemon)
        until(lambda: daemon.ready() or not self.alive(daemon.name), seconds=60)
        if not (self.alive(daemon.name) and daemon.ready()):
            raise ClusterError(f"{daemon.name} did not come up\n{self._logs(daemon.name)}")

    def _spawn(self, daemon: Daemon) -> None:
        """Run it in a session of its own, so that it outlives this shell and its Ctrl-C."""
        with (self.folder / "log" / f"{daemon.name}.out").open("ab") as out:
            child = subprocess.Popen(
                daemon.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                umask=0o022,
                env={**self.client_env, **daemon.environment},
                cwd=self.folder.root,
            )
        self._children.append(child)
        process = Process.read(child.pid)
        write(self._record(daemon.name), f"{child.pid} {process.started if process else 0}")

    def daemons(self) -> list[Daemon]:
        """All of them, in the order in which they need one another."""
        settings = self.settings
        accounting = [self._mariadbd(), self._slurmdbd()] if settings.with_accounting else []
        nodes = [self._slurmd(name) for name in settings.names]
        return [self._munged(), *accounting, self._slurmctld(), *nodes]

    def _munged(self) -> Daemon:
        files = {
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "seed-file": "munged.seed",
            "log-file": "munged.log",
        }
        options = [f"--{key}={self.folder / 'munge' / name}" for key, name in files.items()]
        path = str(self.folder.munge_socket)
        # --force: a folder below /tmp is writable by others further up, which munged dislikes.
        command = ["munged", "--foreground", "--force", f"--socket={path}", "--num-threads=10"]
        return Daemon("munged", command + options, lambda: accepts(path))

    def _mariadbd(self) -> Daemon:
        path = str(self.folder.database_socket)
        command = [
            *("mariadbd", "--no-defaults", f"--user={self.user}", "--skip-networking"),
            *(f"--datadir={self.folder / 'database'}", f"--socket={path}"),
            *("--skip-log-bin", "--performance-schema=OFF", "--innodb-flush-log-at-trx-commit=2"),
            *("--innodb-buffer-pool-size=128M", "--innodb-log-file-size=64M"),
            *("--innodb-lock-wait-timeout=900", f"--pid-file={self.folder / 'pids'}/mariadbd.own"),
        ]
        return Daemon("mariadbd", command, lambda: accepts(path))

    def _slurmdbd(self) -> Daemon:
        address = (LOOPBACK, self.settings.slurmdbd_port)
        environment = {"MYSQL_UNIX_PORT": str(self.folder.database_socket)}

        def answers() -> bool:
            """Whether it answers: it listens sooner, and slurmctld ends where its first question fails."""
            ask, quiet = ["sacctmgr", "-n", "show", "tres"], subprocess.DEVNULL
            return accepts(address) and not subprocess.call(
                ask, stdout=quiet, stderr=quiet, env=self.client_env
            )

        return Daemon("slurmdbd", ["slurmdbd", "-D"], answers, environment)

    def _slurmctld(self) -> Daemon:
        address = (LOOPBACK, self.settings.slurmctld_port)
        command = ["slurmctld", "-D", "-f", str(self.folder.conf)]
        return Daemon("slurmctld", command, lambda: accepts(address))

    def _slurmd(self, node: str) -> Daemon:
        command = ["slurmd", "-D", "-N", node, "-f", str(self.folder.conf)]
        address = (LOOPBACK, self.settings.node_port(node))
        return Daemon(slurmd(node), command, lambda: accepts(address))

    # ---- stop

    def stop(self, remove: bool = False) -> None:
        """Cancel the jobs, then end the daemons; `remove` deletes the folder as well."""
        if not self.exists:
            return
        with self.locked():
            self._cancel_jobs()
            self._stop_all()
        if remove:
            shutil.rmtree(self.folder.root)

    def _cancel_jobs(self) -> None:
        """Let jobs end by Slurm's own hand, so that accounting says CANCELLED, not NODE_FAIL."""
        if not self.alive("slurmctld"):
            return
        with contextlib.suppress(subprocess.SubprocessError):
            jobs = self.ask("squeue", "-h", "-o", "%F").split()
            if jobs:
                self.ask("scancel", *sorted(set(jobs)))
                until(lambda: not self.ask("squeue", "-h"), seconds=15, step=0.2)

    def _stop_all(self) -> None:
        """End every recorded daemon, the last started first, and whatever runs on the nodes."""
        nodes = [name for name in self.recorded() if name.startswith("slurmd.")]
        self._end(nodes)
        for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            self._end([name])
        for name in nodes:
            self._kill_all_on(name.removeprefix("slurmd."))

    def _end(self, names: Sequence[str], seconds: float = 30) -> None:
        """Ask politely, then insist."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            send({pid for name in names if (pid := self.alive(name))}, sig)
            if until(lambda: not any(map(self.alive, names)), seconds):
                break
        for name in names:
            self._record(name).unlink(missing_ok=True)
        for child in self._children:
            child.poll()  # reaps those that this very process started

    # ---- nodes

    def kill_node(self, node: str) -> None:
        """Let a node die as by loss of power: slurmd, its step daemons and every task at once.

        Killing slurmd alone would leave the tasks running to their end, as no dead node does.
        """
        self._check_node(node)
        with self.locked():
            if not until(lambda: self._kill_all_on(node), seconds=15):
                raise ClusterError(f"{node} still runs: {sorted(self._processes_on(node))}")

    def _kill_all_on(self, node: str) -> bool:
        """Kill what is there, and say whether nothing was: a step may just have been forking."""
        processes = self._processes_on(node)
        send(processes, signal.SIGKILL)
        return not processes

    def start_node(self, node: str) -> None:
        """Power it on again and wait until Slurm uses it."""
        self._check_node(node)
        with self.locked():
            self._start_daemon(self._slurmd(node))
            self._wait_for_nodes({node})

    def _wait_for_nodes(self, nodes: set[str]) -> None:
        """Wait until Slurm gives jobs to all of them."""
        if not until(lambda: self._all_serve(nodes), seconds=60):
            missing = sorted(nodes - self.serving())
            logs = "\n".join(self._logs(slurmd(node)) for node in missing[:2])
            raise ClusterError(f"did not come up: {', '.join(missing)}\n{logs}")

    def _all_serve(self, nodes: set[str]) -> bool:
        """Whether they take jobs; those that answer but were drained after a fault are resumed."""
        states = self.node_states()
        held = [n for n in nodes if re.fullmatch("(drain|down)[a-z]*", states.get(n, ""))]
        if held:
            with contextlib.suppress(subprocess.SubprocessError):
                self.ask("scontrol", "update", f"NodeName={','.join(held)}", "State=RESUME")
        return not held and nodes <= self.serving()

    def _check_node(self, node: str) -> None:
        if node not in self.settings.names:
            raise ClusterError(f"no node {node!r}: there are {self.settings.name_range}")

    def _processes_on(self, node: str) -> set[int]:
        """Slurmd, the step daemons (known by the node's log file they hold), and all tasks."""
        processes = Process.all_running()
        mine = {"SLURM_CONF": str(self.folder.conf)}.items()
        log = self.folder / "log" / f"slurmd.{node}.log"
        here = mine | {"SLURMD_NODENAME": node}.items()
        roots = {
            p.pid
            for p in processes
            if (environment := p.environment().items()) >= mine
            and (environment >= here or p.holds(log))
        }
        daemon = self.alive(slurmd(node))
        return with_descendants(roots | ({daemon} if daemon else set()), processes)

    # ---- what is known

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands; with a time limit, since some wait for ever."""
        run = subprocess.run(
            command,
            env=self.client_env,
            capture_output=True,
            encoding="utf-8",
            timeout=30,
            check=True,
        )
        return run.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """Each node's state as Slurm names it; a trailing `*` means it does not answer."""
        with contextlib.suppress(subprocess.SubprocessError):
            lines = self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
            return dict(line.split() for line in lines)
        return {}

    def serving(self) -> set[str]:
        """The nodes that take jobs; a trailing `-` only means that one is planned there."""
        states = self.node_states().items()
        return {node for node, state in states if state.rstrip("-") in SERVING}

    def status(self) -> tuple[str, bool]:
        """A page on what runs, and whether that is everything."""
        names = [daemon.name for daemon in self.daemons()]
        alive = {name: self.alive(name) for name in names}
        lines = [f"{name:20} {f'pid {pid}' if pid else 'down'}" for name, pid in alive.items()]
        states = self.node_states()
        lines += [f"node {name:15} {states.get(name, 'unknown')}" for name in self.settings.names]
        complete = all(alive.values()) and self.serving() >= set(self.settings.names)
        return "\n".join([f"state in {self.folder.root}", *lines]), complete

    def recorded(self) -> list[str]:
        """The daemons that were started and not ended by us."""
        return sorted(p.stem for p in (self.folder / "pids").glob("*.run"))

    def alive(self, name: str) -> int | None:
        """The daemon's pid, if that process is still the one that was started."""
        try:
            pid, started = map(int, self._record(name).read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            return None
        process = Process.read(pid)
        return pid if process and process.runs and process.started == started else None

    def _record(self, name: str) -> Path:
        return self.folder / "pids" / f"{name}.run"

    def _logs(self, name: str) -> str:
        """The last lines of the logs of a daemon that did not start."""
        logs = sorted((self.folder / "log").glob(f"{name}*"))
        return "\n".join(f"--- {log}\n{tail(log)}" for log in logs if log.stat().st_size)


def slurmd(node: str) -> str:
    """The name under which a node's daemon is recorded."""
    return f"slurmd.{node}"


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file in one step, so that no daemon ever reads half of one."""
    new = path.with_name(path.name + ".new")
    new.touch(mode)
    new.chmod(mode)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def tail(path: Path, lines: int = 12) -> str:
    """The end of a log: where the reason stands."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


# ----------------------------------------------------------------------------------------- install


def apt_command() -> str:
    """The one line that gets the packages, ready to paste."""
    sudo = "" if os.getuid() == 0 else "sudo "
    return f"{sudo}apt-get update && {sudo}{' '.join(APT_INSTALL)}"


def missing_packages(accounting: bool = True) -> list[str]:
    """What must be installed before a cluster can start."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    needed = [c for c in PACKAGE_OF_COMMAND if accounting or c not in ACCOUNTING_COMMANDS]
    return [PACKAGE_OF_COMMAND[c] for c in needed if not shutil.which(c, path=path)]


def require_packages(settings: Settings) -> None:
    """Stop before anything is made, and say how to go on."""
    if missing := missing_packages(settings.with_accounting):
        names = ", ".join(dict.fromkeys(missing))
        raise ClusterError(f"not installed: {names}. On Debian or Ubuntu:\n    {apt_command()}")


@contextlib.contextmanager
def no_daemons_from_apt() -> Iterator[None]:
    """Forbid apt to start what it installs: the machine's own munge and MariaDB are not wanted.

    A policy that is already there is somebody's decision and stays; one left behind by an
    interrupted run of ours is removed.
    """
    if POLICY_FILE.exists() and POLICY_FILE.read_text(encoding="utf-8") != POLICY_TEXT:
        yield
        return
    write(POLICY_FILE, POLICY_TEXT, mode=0o755)
    try:
        yield
    finally:
        POLICY_FILE.unlink(missing_ok=True)


def install() -> None:
    """Get the packages with apt, as root."""
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise ClusterError(f"this takes root on Debian or Ubuntu:\n    {apt_command()}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with no_daemons_from_apt():
        for command in (["apt-get", "update"], APT_INSTALL):
            if subprocess.call(command, env=environment, stdout=sys.stderr):
                raise ClusterError(f"failed: {' '.join(command)}")


# ------------------------------------------------------------------------------------ command line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; options not given stay absent, so that kept settings hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--state", type=Path, default=default_state(), help="default: %(default)s")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_install(verbs)
    add_start(verbs.add_parser("start", parents=[folder], help="bring the cluster up"))
    stop = verbs.add_parser("stop", parents=[folder], help="cancel all jobs and end it")
    stop.add_argument("--remove", action="store_true", help="delete the state folder as well")
    verbs.add_parser("env", parents=[folder], help="print the exports a shell needs")
    verbs.add_parser("status", parents=[folder], help="what runs; exit code 1 if not everything")
    for verb, text in {"kill-node": "let a node die", "start-node": "bring it back"}.items():
        verbs.add_parser(verb, parents=[folder], help=text).add_argument("node")
    return parser.parse_args(arguments)


def add_install(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `install`, the one verb that has no state folder."""
    text = "print the command that gets the packages"
    parser = verbs.add_parser("install", help=text, description=text)
    parser.add_argument("--yes", action="store_true", help="as root: run it, starting no daemon")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Describe the settings, with the defaults taken from where they are defined."""
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--nodes", type=int, help=f"default: {Settings.nodes}")
    add("--cpus", type=int, help=f"per node, default: {Settings.cpus}")
    add("--memory-mb", type=int, help=f"per node, default: {Settings.memory_mb}")
    add("--gpus", type=int, help=f"fake GPUs per node, default: {Settings.gpus}")
    add("--prefix", help=f"of the nodes' names, default: {Settings.prefix}")
    add("--accounting", choices=["slurmdbd", "none"], help=f"default: {Settings.accounting}")
    text = "a line of slurm.conf, added or replaced; may be repeated"
    add("--set", action="append", dest="overrides", metavar="KEY=VALUE", help=text)


def run_install(yes: bool) -> None:
    """Show the command, or run it; without `yes` nothing on the machine is touched."""
    if not yes:
        print(apt_command())
    elif missing_packages():
        install()


def run_start(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Start with the settings that were named on the command line."""
    fields = {field.name for field in dataclasses.fields(Settings)}
    asked = {key: value for key, value in vars(arguments).items() if key in fields}
    if "overrides" in asked:
        asked["overrides"] = tuple(asked["overrides"])
    begun = time.monotonic()
    cluster.start(**asked)
    call = shlex.join([sys.executable, sys.argv[0], "env", "--state", str(cluster.folder.root)])
    print(f"{cluster.settings.name_range} up in {time.monotonic() - begun:.1f} s. Now run:")
    print(f'    eval "$({call})"')


def run_env(cluster: Cluster) -> None:
    """Print what `eval` takes; a folder without a cluster is an error, not an empty answer."""
    if not cluster.folder.conf.exists():
        raise ClusterError(f"no cluster in {cluster.folder.root}: start one first")
    for name, value in cluster.env.items():
        print(f"export {name}={shlex.quote(value)}")


def run_status(cluster: Cluster) -> int:
    """Print it; the exit code is for scripts that wait for a whole cluster."""
    text, complete = cluster.status()
    print(text)
    return 0 if complete else 1


def run(arguments: argparse.Namespace) -> int:
    """Do what the verb says."""
    if arguments.verb == "install":
        run_install(arguments.yes)
        return 0
    cluster = Cluster(arguments.state)
    match arguments.verb:
        case "start":
            run_start(cluster, arguments)
        case "stop":
            cluster.stop(remove=arguments.remove)
        case "env":
            run_env(cluster)
        case "status":
            return run_status(cluster)
        case "kill-node":
            cluster.kill_node(arguments.node)
        case "start-node":
            cluster.start_node(arguments.node)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; an error the user can act on is one message, not a traceback."""
    try:
        return run(parse(sys.argv[1:] if arguments is None else arguments))
    except (ClusterError, OSError) as error:
        print(f"local_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
