"""The cluster of `slurm/local_cluster.py`: what its users rely on, shown with real daemons."""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import local_cluster
from slurm.local_cluster import Cluster, ClusterError, Process, Settings
from tests.launchers.slurm.conftest import SlurmClient, eventually

SCRIPT = Path(local_cluster.__file__)


def call(state: Path, verb: str, *options: str, runner: tuple[str, ...] = (sys.executable,)) -> str:
    """Use the script as its users do: by its command line, in a process of its own."""
    command = [*runner, str(SCRIPT), verb, "--state", str(state), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_packages")
def test_the_verbs_from_start_to_stop(state_folder: Path) -> None:
    options = ("--nodes", "2", "--accounting", "none", "--set", "MaxArraySize=6")
    assert "127.0.0.[1-2] up in" in call(state_folder, "start", *options)
    cluster = Cluster(state_folder)
    daemons = living(cluster)
    assert len(daemons) == 4
    assert f"export SLURM_CONF={state_folder}/slurm.conf" in call(state_folder, "env")
    assert call(state_folder, "start").startswith("0")
    assert living(cluster) == daemons
    assert "other settings" in call(state_folder, "start", "--nodes", "3")
    assert "MaxArraySize            = 6" in cluster.ask("scontrol", "show", "config")
    assert call(state_folder, "status").startswith("0")
    assert call(state_folder, "stop").startswith("0")
    assert not any(map(runs, daemons))
    assert call(state_folder, "status").startswith("1")
    assert call(state_folder, "stop", "--remove").startswith("0")
    assert not state_folder.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_packages")
def test_it_comes_back_after_all_daemons_were_killed(state_folder: Path) -> None:
    cluster = Cluster(state_folder)
    cluster.start(nodes=1)
    try:
        client = SlurmClient(cluster)
        before = client.submit("true")
        eventually(lambda: client.accounting(before) == ["COMPLETED"], 30, "sacct knows it")
        local_cluster.send(set(living(cluster)), signal.SIGKILL)
        eventually(lambda: not living(cluster), 10, "all daemons dead")
        cluster.start()
        assert client.accounting(before) == ["COMPLETED"]
        client.wait(client.submit("true"))
    finally:
        cluster.stop()


def as_nobody() -> tuple[str, ...]:
    """Find a way to run Python as another user, or skip."""
    runner = ("runuser", "-u", "nobody", "--", "/usr/bin/python3")
    if os.getuid() != 0 or not shutil.which("runuser"):
        pytest.skip("only root can become another user, and needs runuser for it")
    if subprocess.call([*runner, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]):
        pytest.skip("needs a user `nobody` with a /usr/bin/python3 of 3.11 or newer")
    return runner


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_packages")
@pytest.mark.parametrize("accounting", [pytest.param("none", marks=pytest.mark.full), "slurmdbd"])
def test_it_needs_no_root(
    state_folder: Path, accounting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = as_nobody()
    script = state_folder.parent / SCRIPT.name
    shutil.copy(SCRIPT, script)
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", script)
    os.chown(state_folder.parent, pwd.getpwnam("nobody").pw_uid, -1)
    options = ("--nodes", "2", "--accounting", accounting)
    assert "up in" in call(state_folder, "start", *options, runner=runner)
    try:
        client = SlurmClient(Cluster(state_folder))
        who = client.run("runuser", "-u", "nobody", "--", "srun", "-N2", "id", "-un")
        assert who.split() == ["nobody", "nobody"]
        assert call(state_folder, "kill-node", "127.0.0.2", runner=runner) == "0 "
        assert call(state_folder, "start-node", "127.0.0.2", runner=runner) == "0 "
    finally:
        stopped = call(state_folder, "stop", runner=runner)
    assert stopped == "0 "
    assert not living(Cluster(state_folder))


# --------------------------------------------------------------------- the cluster of the session


@pytest.mark.slow
def test_two_clusters_share_no_port(cluster: SlurmClient, state_folder: Path) -> None:
    other = Cluster(state_folder)
    other.start(nodes=2, accounting="none")
    try:
        client = SlurmClient(other)
        assert not set(other.settings.ports) & set(cluster.cluster.settings.ports)
        assert len(client.run("srun", "-N2", "true", timeout=30)) == 0
        assert len(cluster.run("srun", "-N4", "true", timeout=30)) == 0
    finally:
        other.stop()


@pytest.mark.slow
def test_srun_reaches_nodes_that_resolve_and_the_gpus_that_it_was_granted(
    cluster: SlurmClient,
) -> None:
    out = cluster.run("srun", "-N2", "--ntasks-per-node=2", "printenv", "SLURMD_NODENAME")
    names = sorted(out.split())
    assert names == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    assert [socket.gethostbyname(name) for name in names] == names
    for asked, devices in (
        (["--gpus-per-node=3"], {"0,1,2"}),
        (["--ntasks-per-node=2", "--gpus-per-task=2"], {"0,1", "2,3"}),
    ):
        out = cluster.run("srun", "-N2", *asked, "printenv", "CUDA_VISIBLE_DEVICES")
        assert set(out.split()) == devices
    with pytest.raises(AssertionError, match="not available"):
        cluster.submit("true", "--gpus-per-node=9")


@pytest.mark.slow
def test_code_inside_pytest_finds_the_cluster(
    slurm_environ: SlurmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "hello")
    assert subprocess.check_output(["sinfo", "-h", "-o", "%D", "-p", "main"]) == b"4\n"
    assert slurm_environ.run("srun", "printenv", "GREETING") == "hello"


@pytest.mark.slow
def test_an_array_runs_every_element_and_accounting_tells_how_jobs_ended(
    cluster: SlurmClient, tmp_path: Path
) -> None:
    array = cluster.submit("echo $SLURM_ARRAY_TASK_ID", "--array=0-7%4", output=tmp_path / "%a.out")
    jobs = {"COMPLETED": cluster.submit("true"), "FAILED": cluster.submit("exit 3")}
    cancelled = cluster.submit("sleep 300")
    cluster.wait(cancelled, "RUNNING")
    cluster.run("scancel", cancelled)
    cluster.wait(array)
    written = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert written == {f"{i}.out": f"{i}\n" for i in range(8)}
    for state, job in jobs.items():
        eventually(lambda s=state, j=job: cluster.accounting(j) == [s], 30, f"{job} {state}")
    eventually(lambda: "CANCELLED" in "".join(cluster.accounting(cancelled)), 30, "cancelled")


@pytest.mark.full
def test_a_dead_node_takes_its_tasks_along_and_slurm_notices(
    cluster: SlurmClient, tmp_path: Path
) -> None:
    node, pid_file = cluster.names[-1], tmp_path / "pid"
    options = (f"--nodelist={node}", "--mem=100")
    task = f"setsid sh -c 'echo $$ > {pid_file}; sleep 300' & wait"
    lost = cluster.submit(task, "--no-requeue", *options)
    again = cluster.submit("sleep $((300 - 300 * ${SLURM_RESTART_COUNT:-0}))", *options)
    eventually(lambda: pid_file.exists() and bool(pid_file.read_text()), 20, "the task runs")
    cluster.wait(again, "RUNNING")
    cluster.kill_node(node)
    try:
        assert not runs(int(pid_file.read_text()))
        cluster.wait(lost, "NODE_FAIL", seconds=90)
        assert cluster.cluster.node_states()[node].startswith("down")
    finally:
        cluster.start_node(node)
    cluster.wait(again, "COMPLETED", seconds=60)
    assert cluster.detail(again)["Restarts"] == "1"
    eventually(lambda: cluster.accounting(lost) == ["NODE_FAIL"], 30, "sacct says NODE_FAIL")


@pytest.mark.slow
def test_starting_a_node_takes_it_out_of_drain(cluster: SlurmClient) -> None:
    node = cluster.names[0]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fault")
    eventually(lambda: node not in cluster.cluster.serving(), 10, "drained")
    cluster.start_node(node)
    assert node in cluster.cluster.serving()


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
