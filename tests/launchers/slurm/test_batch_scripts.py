"""The whole batch scripts of a few requests, as they are submitted; `golden/` holds the expected texts.

After an intended change: `UPDATE_GOLDEN=1 pytest tests/launchers/slurm/test_batch_scripts.py`.
"""

import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.test_packing import settings
from vitsweep.errors import VitsweepError
from vitsweep.files import remove
from vitsweep.foreign import read_lines
from vitsweep.launchers.slurm.node import agent
from vitsweep.launchers.slurm.node.coordinator import NOT_STARTED
from vitsweep.launchers.slurm.state.jobs import job_arrays
from vitsweep.launchers.slurm.submit import sbatch
from vitsweep.launchers.slurm.submit.sbatch import PlannedJob, environment_of_sbatch
from vitsweep.launchers.slurm.submit.settings import Request
from vitsweep.results.store import Store
from vitsweep.spec.menu import conf_dir

GOLDEN = Path(__file__).parent / "golden"
CPU = Request(nodes=1, ranks_per_node=2, cpus=4, gpus=0, memory_gib=None, minutes=40)
GPU = Request(nodes=4, ranks_per_node=8, cpus=64, gpus=8, memory_gib=250.5, minutes=120)
REQUESTS = {
    "cpu": (CPU, (), {}),
    "gpu_type": (
        GPU,
        ("last", "/my code"),
        {"partition": "gpu", "gpu_type": "h100", "account": "vision", "qos": "high"},
    ),
    "site_profile": (
        GPU,
        ("first", "/code"),
        {
            **yaml.safe_load((conf_dir() / "hydra/launcher/slurm_example_site.yaml").read_text()),
            "srun_args": ["--container-image=/images/vit sweep.sqsh"],
            "python": ["apptainer", "exec", "--nv", "/images/vitsweep.sif", "python"],
            "additional_parameters": {
                "mail-type": "END",
                "reservation": "friday",
                "comment": 'it\'s "quoted"; $HOME',
            },
        },
    ),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sweep; the `sbatch` command on this machine, which needs no Slurm, accepts everything."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun"):  # submitit looks for `srun` before it calls the other
        command = commands / name
        command.write_text("#!/bin/sh\necho Submitted batch job 42\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return Store(tmp_path / "results" / "sweep").create()


@pytest.mark.parametrize("name", REQUESTS)
def test_batch_script(name: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    request, place, given = REQUESTS[name]
    monkeypatch.setattr(sbatch, "folder_on_path", lambda: place)
    given = {key: value for key, value in given.items() if key != "defaults"}
    jobs = [PlannedJob(blocks=(), minutes=1.0)] * 3
    array = sbatch.submit(store, request, jobs, settings(**given), Path("/code"), {})
    assert array.slurm_id == "42"
    [script] = array.folder.glob("*submission.sh")
    found = masked(script.read_text(), array.folder)
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def masked(script: str, folder: Path) -> str:
    """Replace paths and digests, which differ from one machine and submission to the next."""
    script = script.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON")
    return re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", script)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", ["tasks.jsonl", "key", "digest"])
def test_a_job_runs_what_was_submitted_or_refuses(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, node: int
) -> None:
    """Whoever can write into the folder can replace its files, and not the batch script that Slurm keeps."""
    array = sbatch.submit(store, CPU, [PlannedJob((), 1.0)], settings(), Path("/code"), {})
    assert store.digests == {}
    [script] = array.folder.glob("*submission.sh")
    [digest] = re.findall(r"\b[0-9a-f]{64}\b", script.read_text())
    assert array.job(0, array.work(digest)) == next(array.jobs())
    if name == "digest":
        digest = ""  # of an earlier version
    else:
        text = (array.folder / name).read_text()
        remove(array.folder / name)
        (array.folder / name).write_text(f"{text} ")
    given = {"JOB_ID": "8", "NODEID": str(node), "JOB_NODELIST": "n1,n2", "RESTART_COUNT": "2"}
    for key, value in given.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    assert agent.main(array.folder, digest) == NOT_STARTED
    ends = read_lines(array.folder / "0.jsonl")
    assert [(end["event"], end["restart"]) for end in ends] == [("job_end", 2)] * (node == 0)
    assert all(f"`{array.folder}`" in end["reason"] for end in ends)


LOST_REPLY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("reply", "squeue", "left"),
    [
        (LOST_REPLY, 'echo "42 |$(cat {taken})"', "taken"),
        (LOST_REPLY, "exit 0", "unknown"),
        (LOST_REPLY, "exit 1", "unknown"),
        ("sbatch: error: Invalid account", "exit 0", "refused"),
    ],
)
def test_an_array_whose_reply_is_lost_is_looked_up_and_never_forgotten(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: str,
    squeue: str,
    left: str,
) -> None:
    """Slurm may have taken it: whoever forgets it submits its runs twice."""
    taken = tmp_path / "taken"
    (tmp_path / "bin" / "sbatch").write_text(
        f'#!/bin/sh\nfor last; do :; done; echo "$last" > {taken}; echo "{reply}" >&2; exit 1\n'
    )
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{squeue.format(taken=taken)}\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setattr(sbatch, "LOOK_UP_AFTER_S", (0, 0))
    arguments = (
        store,
        CPU,
        [PlannedJob(blocks=(), minutes=1.0)],
        settings(),
        Path("/code"),
        {},
    )
    if left == "taken":
        array = sbatch.submit(*arguments)
        assert array.slurm_id == "42"
        return
    said = "did not say whether" if left == "unknown" else "refuses the job array"
    with pytest.raises(VitsweepError, match=said):
        sbatch.submit(*arguments)
    assert len(job_arrays(store)) == (left == "unknown")


SECRETS = {
    "WANDB_API_KEY": "planted",
    "AWS_SECRET_ACCESS_KEY": "planted",
    "HF_TOKEN": "planted",
    "GITHUB_PAT": "planted",
    "DB_PASSWORD": "planted",
    "HTTPS_PROXY": "http://me:planted@proxy:3128",
    "SENTRY": "https://planted@sentry.example.org/1",
    **dict.fromkeys(("PGPASSWORD", "SSHPASS", "MYSQL_PWD", "MYTOKEN", "GITHUB_AUTH"), "planted"),
}
PASSED = {
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/lib",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_SOCKET_IFNAME": "ib0",
    "OMP_NUM_THREADS": "4",
    "MODULEPATH": "/modules",
    "LMOD_CMD": "/lmod",
    "CONDA_PREFIX": "/conda",
    "https_proxy": "http://proxy:3128",
    "SLURM_CONF": "/etc/slurm.conf",
}
UNKNOWN = {
    "MYCREDS": "a",
    "BEARER": "b",
    "DB_PW": "c",
    "ALERTS": "https://hooks.slack.com/services/T0/B0/x",
    "CONDA_TOKEN": "d",
    "http_proxy": "http://me:word@proxy:3128",
    "ANYTHING": "e",
}


def test_jobs_get_what_programs_need_and_no_secret(monkeypatch):
    for name, value in (SECRETS | PASSED | UNKNOWN).items():
        monkeypatch.setenv(name, value)
    with environment_of_sbatch({"additional_parameters": {}}, ["HF_TOKEN"]):
        visible = dict(os.environ)
    assert {name for name in SECRETS if name in visible} == {"HF_TOKEN"}
    assert PASSED.items() <= visible.items()
    assert not UNKNOWN.keys() & visible.keys()
    assert SECRETS.items() <= os.environ.items()


OF_MODULES = {
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_PARTITION": "high",
    "SBATCH_MEM_PER_CPU": "100",
    "SBATCH_JOB_NAME": "theirs",
    "SBATCH_EXCLUSIVE": "mcs",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_NETWORK": "theirs",
    "SBATCH_QOS": "normal",
    "SBATCH_ACCOUNT": "theirs",
}


def test_what_modules_set_never_wins_over_a_setting(
    slurm_environ: SlurmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch prefers its environment to the options of a batch script."""
    for name, value in OF_MODULES.items():
        monkeypatch.setenv(name, value)
    given = settings(partition="main", mem_gb=1, additional_parameters={"hold": True, "qos": "low"})
    request = replace(CPU, memory_gib=1)
    own = Store(tmp_path / "sweep").create()
    array = sbatch.submit(own, request, [PlannedJob((), 1.0)], given, Path("/code"), {})
    found = slurm_environ.detail(f"{array.slurm_id}_0")
    slurm_environ.cancel_all()
    told = {key: found[key] for key in ("TimeLimit", "Partition", "JobName", "Requeue")}
    assert told == {
        "TimeLimit": "00:40:00",
        "Partition": "main",
        "JobName": "vitsweep-sweep",
        "Requeue": "1",
    }
    assert "MinMemoryNode" in found
    assert found.get("Network") != "theirs"
    options = sbatch.parameters("sweep", request, given, Path("/code"))
    with environment_of_sbatch(options, ()):
        left = {name for name in os.environ if name.startswith("SBATCH_")}
    assert left == {"SBATCH_ACCOUNT"}, "no setting says another"
