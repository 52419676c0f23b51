"""The cluster of `slurm/local_cluster.py`: what its users rely on, shown with real daemons."""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slurm import local_cluster
from slurm.local_cluster import Cluster, ClusterError, Process, Settings
from tests.launchers.slurm.conftest import SlurmClient, eventually

SCRIPT = Path(local_cluster.__file__)


def call(state: Path, verb: str, *options: str, runner: tuple[str, ...] = (sys.executable,)) -> str:
    """Use the script as its users do: by its command line, in a process of its own."""
    command = [*runner, str(SCRIPT), verb, "--state", str(state), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return f"{done.returncode} {done.stdout}{done.stderr}"


def living(cluster: Cluster) -> list[int]:
    return [pid for name in cluster.recorded() if (pid := cluster.alive(name))]


def runs(pid: int) -> bool:
    process = Process.read(pid)
    return bool(process and process.runs)


# ---------------------------------------------------------------------------- no daemons needed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(nodes=0), "--nodes 0"),
        (Settings(nodes=300), "--prefix c"),
        (Settings(prefix="a b"), "--prefix 'a b'"),
        (Settings(cpus=0), "--cpus"),
        (Settings(overrides=("MaxArraySize",)), "KEY=VALUE"),
        (Settings(overrides=("A=1\nB=2",)), "KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: Settings, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        settings.check()


def test_an_override_replaces_the_line_instead_of_repeating_it(tmp_path: Path) -> None:
    settings = Settings(overrides=("MaxArraySize=11",))
    folder = local_cluster.Folder(tmp_path)
    text = local_cluster.slurm_conf(settings, folder, local_cluster.Host("here", private=True))
    assert re.findall("MaxArraySize=.*", text) == ["MaxArraySize=11"]


@pytest.mark.parametrize("path", ["with space", "x" * 90, "percent%n"])
def test_a_folder_that_slurm_cannot_use_is_refused(path: str) -> None:
    with pytest.raises(ClusterError, match="--state"):
        local_cluster.Folder(Path("/tmp") / path).create()


def test_a_folder_with_other_things_in_it_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="other things"):
        local_cluster.Folder(tmp_path).create()
    Cluster(tmp_path).stop(remove=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_taken_port_is_not_used() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = Settings(base_port=other.getsockname()[1])
        chosen = local_cluster.with_free_ports(taken)
    assert chosen.base_port != taken.base_port
    assert max(chosen.ports) < 20_000


def test_verbs_without_a_cluster_say_so(tmp_path: Path) -> None:
    for verb in ("env", "status"):
        assert call(tmp_path / "none", verb).startswith("2 local_cluster: no cluster in")
    assert call(tmp_path / "none", "stop") == "0 "


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster.shutil, "which", lambda name, path: None)
    with pytest.raises(ClusterError, match=r"munge, slurmctld.*\n.*apt-get .*install -y.* munge"):
        local_cluster.require_packages(Settings())
    with pytest.raises(ClusterError, match=r": munge, slurmctld, slurmd, slurm-client\."):
        local_cluster.require_packages(Settings(accounting="none"))


def run_apt_that_asks_the_policy() -> None:
    with local_cluster.no_daemons_from_apt():
        subprocess.run([local_cluster.POLICY_FILE], check=True)


def test_apt_starts_no_daemon_and_the_policy_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(local_cluster, "POLICY_FILE", policy)
    with pytest.raises(subprocess.CalledProcessError, match="101"):
        run_apt_that_asks_the_policy()
    assert not policy.exists()


def test_a_policy_of_somebody_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 104\n")
    monkeypatch.setattr(local_cluster, "POLICY_FILE", policy)
    with local_cluster.no_daemons_from_apt():
        pass
    assert "104" in policy.read_text()


# ------------------------------------------------------------------------------- its own cluster


def as_nobody() -> tuple[str, ...]:
    """Python as a user who is not root, or as this one where that is impossible."""
    runner = ("runuser", "-u", "nobody", "--", "/usr/bin/python3")
    if os.getuid() != 0 or not shutil.which("runuser"):
        return (sys.executable,)
    old = subprocess.call([*runner, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"])
    return (sys.executable,) if old else runner


# Half a minute where other tests run: daemons, and those of the accounting, are started twice.
@pytest.mark.slow
@pytest.mark.parametrize("accounting", [pytest.param("none", marks=pytest.mark.full), "slurmdbd"])
def test_the_verbs_from_start_to_stop_need_no_root(
    cluster: SlurmClient, state_folder: Path, accounting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the cluster of the session; all its daemons are killed once."""
    runner, script = as_nobody(), state_folder.parent / SCRIPT.name
    shutil.copy(SCRIPT, script)
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", script)
    user = "nobody" if len(runner) > 1 else pwd.getpwuid(os.getuid()).pw_name
    os.chown(state_folder.parent, pwd.getpwnam(user).pw_uid, -1)
    options = ("--nodes", "2", "--accounting", accounting, "--set", "MaxArraySize=6")

    def typed(verb: str, *words: str) -> str:
        return call(state_folder, verb, *words, runner=runner)

    try:
        assert "127.0.0.[1-2] up in" in typed("start", *options)
        own = Cluster(state_folder)
        daemons, client = living(own), SlurmClient(own)
        assert len(daemons) >= 4
        assert f"export SLURM_CONF={state_folder}/slurm.conf" in typed("env")
        assert typed("start").startswith("0")
        assert living(own) == daemons
        assert "other settings" in typed("start", "--nodes", "3")
        assert "MaxArraySize            = 6" in own.ask("scontrol", "show", "config")
        assert typed("status").startswith("0")

        assert client.run(*runner[:-1], "srun", "-N2", "id", "-un").split() == [user, user]
        assert not set(own.settings.ports) & set(cluster.cluster.settings.ports)
        assert len(cluster.run("srun", "-N4", "true")) == 0
        assert typed("kill-node", "127.0.0.2") == "0 "
        assert typed("start-node", "127.0.0.2") == "0 "

        submit = (*runner[:-1], "sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
        before = client.run(*submit)
        client.wait(before)
        has_accounting = accounting == "slurmdbd"
        if has_accounting:
            eventually(lambda: client.accounting(before) == ["COMPLETED"], 60, "sacct knows it")
        local_cluster.send(set(living(own)), signal.SIGKILL)
        eventually(lambda: not living(own), 60, "all daemons dead")
        assert typed("start").startswith("0")
        if has_accounting:
            assert client.accounting(before) == ["COMPLETED"]
        client.wait(client.run(*submit))
        daemons = living(own)
    finally:
        stopped = typed("stop")
    assert stopped == "0 "
    assert not any(map(runs, daemons))
    assert typed("status").startswith("1")
    assert typed("stop", "--remove").startswith("0")
    assert not state_folder.exists()


# --------------------------------------------------------------------- the cluster of the session


@pytest.mark.slow
def test_the_cluster_runs_arrays_and_steps_where_and_with_what_they_ask_for(
    slurm_environ: SlurmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = slurm_environ
    array = cluster.submit("echo $SLURM_ARRAY_TASK_ID", "--array=0-7%4", output=tmp_path / "%a.out")
    jobs = {"COMPLETED": cluster.submit("true"), "FAILED": cluster.submit("exit 3")}
    cluster.wait(array)
    written = {p.name: p.read_text() for p in tmp_path.glob("*.out")}
    assert written == {f"{i}.out": f"{i}\n" for i in range(8)}
    cancelled = cluster.submit("sleep 300")
    cluster.wait(cancelled, "RUNNING")
    cluster.run("scancel", cancelled)

    out = cluster.run("srun", "-N2", "--ntasks-per-node=2", "printenv", "SLURMD_NODENAME")
    found = Counter(out.split())
    assert set(found) <= set(cluster.names)
    assert [*found.values()] == [2, 2]
    assert [socket.gethostbyname(name) for name in found] == [*found]
    for asked, devices in (
        (["--gpus-per-node=3"], {"0,1,2"}),
        (["--ntasks-per-node=2", "--gpus-per-task=2"], {"0,1", "2,3"}),
    ):
        out = cluster.run("srun", "-N2", *asked, "printenv", "CUDA_VISIBLE_DEVICES")
        assert set(out.split()) == devices
    with pytest.raises(AssertionError, match="not available"):
        cluster.submit("true", "--gpus-per-node=9")

    monkeypatch.setenv("GREETING", "hello")  # code inside pytest finds the cluster
    assert subprocess.check_output(["sinfo", "-h", "-o", "%D", "-p", "main"]) == b"4\n"
    assert cluster.run("srun", "printenv", "GREETING") == "hello"

    node = cluster.names[0]  # starting it takes it out of drain
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fault")
    eventually(lambda: node not in cluster.cluster.serving(), 60, "drained")
    cluster.start_node(node)
    assert node in cluster.cluster.serving()

    for state, job in jobs.items():
        eventually(lambda s=state, j=job: cluster.accounting(j) == [s], 60, f"{job} {state}")
    eventually(lambda: "CANCELLED" in "".join(cluster.accounting(cancelled)), 60, "cancelled")


@pytest.mark.full
def test_a_dead_node_takes_its_tasks_along_and_slurm_notices(
    cluster: SlurmClient, tmp_path: Path
) -> None:
    node, pid_file = cluster.names[-1], tmp_path / "pid"
    options = (f"--nodelist={node}", "--mem=100")
    task = f"setsid sh -c 'echo $$ > {pid_file}; sleep 300' & wait"
    lost = cluster.submit(task, "--no-requeue", *options)
    again = cluster.submit("sleep $((300 - 300 * ${SLURM_RESTART_COUNT:-0}))", *options)
    eventually(lambda: pid_file.exists() and bool(pid_file.read_text()), 300, "the task runs")
    cluster.wait(again, "RUNNING")
    cluster.kill_node(node)
    try:
        assert not runs(int(pid_file.read_text()))
        cluster.wait(lost, "NODE_FAIL", seconds=400)
        assert cluster.cluster.node_states()[node].startswith("down")
    finally:
        cluster.start_node(node)
    cluster.wait(again, "COMPLETED", seconds=60)
    assert cluster.detail(again)["Restarts"] == "1"
    eventually(lambda: cluster.accounting(lost) == ["NODE_FAIL"], 300, "sacct says NODE_FAIL")


@pytest.mark.full
def test_the_high_partition_preempts_scavengers_with_a_signal(
    cluster: SlurmClient, tmp_path: Path
) -> None:
    seen = tmp_path / "signal"
    task = f"trap 'date > {seen}' USR2; while :; do sleep 0.2; done"
    victim = cluster.submit(task, "-p", "scavenge", "--exclusive", "-N4", "--signal=B:USR2@60")
    cluster.wait(victim, "RUNNING")
    urgent = cluster.submit("true", "-p", "high", "--exclusive", "-N4")
    cluster.wait(urgent, seconds=60)
    assert seen.exists()
    assert cluster.detail(victim)["Restarts"] == "1"
    cluster.run("scancel", victim)
