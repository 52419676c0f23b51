"""What Slurm's commands print, read without a cluster: scripts that print it stand before all others."""

from pathlib import Path

import pytest

from tests.launchers.slurm.test_job_control import command_on_path
from tests.launchers.slurm.test_packing import settings
from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm import commands
from vitsweep.launchers.slurm.commands import (
    LIVE_STATES,
    SlurmJob,
    machine_of,
    scancel,
    slurm_output,
    squeue,
    submitted_scripts,
)
from vitsweep.rates.profile import most_usable_bytes, profiles_of_type


@pytest.fixture
def prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let a command of Slurm print lines, and end with an exit code."""

    def put(name: str, *lines: str, code: int = 0, error: str = "") -> Path:
        asked = tmp_path / f"{name}.asked"
        (tmp_path / f"{name}.out").write_text("".join(f"{line}\n" for line in lines))
        script = f'echo "$@" >> {asked}\ncat {tmp_path}/{name}.out\necho "{error}" >&2\nexit {code}'
        command_on_path(tmp_path / "bin", monkeypatch, name, script)
        return asked

    return put


def test_jobs_are_read_from_the_queue(prints):
    rows = (
        "7 |0 |RUNNING |None |0 |1 |/s/jobs/a/run.sh ",
        "7 |1 |FAILED |NonZeroExitCode |512 |0 |/a|b ",
        "8 |0 |PENDING |Priority |0 |0 | ",
    )
    asked = prints("squeue", *rows)
    assert squeue({"7", "9"}) == {
        "7_0": SlurmJob(state="RUNNING", reason="None", restarts=1, script="/s/jobs/a/run.sh"),
        "7_1": SlurmJob(state="FAILED", reason="NonZeroExitCode", exit_code=2, script="/a|b"),
    }
    assert asked.read_text().startswith("-j 7,9 -h -r -t all ")
    asked.unlink()
    assert squeue(set()) == {}
    assert not asked.exists()
    prints("squeue", rows[0], code=1, error="slurm_load_jobs error: Invalid job id specified")
    assert list(squeue({"7"})) == ["7_0"]
    prints("squeue", rows[0], code=1, error="Unable to contact slurm controller")
    assert squeue({"7"}) is None


def test_a_job_lives_in_states_that_are_not_final():
    assert [SlurmJob(state=s).is_live for s in ("PENDING", "COMPLETING", "COMPLETED")] == [
        True,
        True,
        False,
    ]
    assert not {"TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED"} & LIVE_STATES


def test_what_a_command_prints_counts_where_it_ends_well(prints, tmp_path, monkeypatch):
    asked = prints("squeue", "7 |/s/run.sh ", "8 |/t/run.sh ")
    assert submitted_scripts([1, 2]) == {"/s/run.sh": "7", "/t/run.sh": "8"}
    assert asked.read_text().startswith("--user=1,2 -h ")
    prints("squeue", "7 |/s/run.sh ", code=1)
    assert submitted_scripts([1]) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_output("squeue") is None


def test_jobs_are_cancelled_five_hundred_at_a_time(prints):
    asked = prints("scancel", error="no such job")
    assert scancel([str(n) for n in range(1001)]) == "no such job\nno such job\nno such job"
    assert [len(line.split()) for line in asked.read_text().splitlines()] == [500, 500, 1]
    prints("scancel")
    assert scancel(["1"]) == ""
    assert scancel([]) == ""


def machine(**given):
    found = machine_of(settings(**given))
    return found.device, found.cores_per_node, found.devices_per_node, found.described_by


def test_the_machine_of_a_partition_is_the_one_kind_of_its_nodes(prints):
    asked = prints("sinfo", "16+|(null)|avx|main*", "64|gpu:zzz:8|big,nvme|gpu")
    assert machine() == ("cpu", 16, 0, "partition (default)")
    prints("sinfo", "64|gpu:zzz:8(S:0-1)|big,nvme|gpu", "64|gpu:zzz:8|big|gpu")
    assert machine(partition="gpu") == ("cuda", 64, 8, "partition gpu")
    assert "-p gpu" in asked.read_text().splitlines()[-1]
    prints("sinfo", "64|gpu:zzz:8|big,nvme|gpu", "32|gpu:zzz:4|small|gpu")
    for constraint, kind in (("small", (32, 4)), ("nvme", (64, 8))):
        assert machine(partition="gpu", constraint=constraint)[1:3] == kind
    for given in ({}, {"constraint": "small|big"}):
        with pytest.raises(VitsweepError, match=r"`hydra\.launcher\.constraint`"):
            machine(partition="gpu", **given)
    with pytest.raises(VitsweepError, match=r"there is big, nvme, small\."):
        machine(partition="gpu", constraint="none")
    prints("sinfo")
    with pytest.raises(VitsweepError, match=r"`hydra\.launcher\.partition=gpuu`: no node has it"):
        machine(partition="gpuu")
    prints("sinfo", "64|(null)|big|main*")
    with pytest.raises(VitsweepError, match=r"`hydra\.launcher\.gpu_type=h100`: .* no GPU"):
        machine(gpu_type="h100")
    prints("sinfo", "64|gpu:zzz:8|big|gpu", "8|(null)||main")
    with pytest.raises(VitsweepError, match=r": none\..*`hydra\.launcher\.partition`"):
        machine()  # no partition is the default


def test_what_the_profile_of_a_site_says_counts_before_slurm(prints):
    asked = prints("sinfo", "16|gpu:zzz:2|avx|main*")
    site = {"cores_per_node": "auto", "gpus_per_node": "auto"}
    assert machine(site=site)[:3] == ("cuda", 16, 2)
    assert machine(site=site | {"cores_per_node": 12})[:3] == ("cuda", 12, 2)
    assert machine(site=site | {"gpus_per_node": 0})[:3] == ("cpu", 16, 0)
    asked.unlink()
    assert machine(site={"cores_per_node": 4, "gpus_per_node": 0})[:3] == ("cpu", 4, 0)
    assert not asked.exists()


def test_the_memory_of_the_gpus_is_known_where_all_their_types_are(prints):
    found_profiles: list[str] = []

    def facts(**given):
        found = machine_of(settings(site={"cores_per_node": 4, "gpus_per_node": 1}, **given))
        found_profiles[:] = found.profiles or ()
        return found.gib_per_device, found.least_gib, found.has_tf32

    a100, v100 = (most_usable_bytes(name) / 2**30 for name in ("a100", "v100"))
    least = min(p.usable_bytes for p in profiles_of_type("v100")) / 2**30
    asked = prints("sinfo", "gpu:a100:1", "gpu:v100:1,nvme:1", "(null)")
    assert facts() == (max(a100, v100), least, False)
    assert asked.read_text().split() == ["-h", "-o", "%G"]
    assert facts(partition="p") == facts()
    assert "-p p" in asked.read_text()
    assert found_profiles == ["a100_40g", "a100_80g", "v100", "v100_16g"]
    assert facts(gpu_type="h100")[2] is True
    assert found_profiles == ["h100"]
    assert facts(gres="gpu:v100:1") == (v100, least, False)
    assert found_profiles == ["v100", "v100_16g"]
    assert facts(gres="gpu:1") == (None, None, None)
    assert found_profiles == []
    prints("sinfo", "gpu:a100:1", "gpu:zzz:1")
    assert facts() == (None, None, None)
    assert found_profiles == [], "one of them is unknown"
    prints("sinfo", "gpu:h100:8", "gpu:h100:4")
    assert facts(partition="p")[2] is True
    assert found_profiles == ["h100"]
    prints("sinfo", code=1)
    assert facts() == (None, None, None)


def test_a_sinfo_that_is_silent_is_named(prints, monkeypatch):
    prints("sinfo", code=1)
    prints("sbatch")
    with pytest.raises(VitsweepError, match="`sinfo`"):
        machine()
    monkeypatch.setattr(commands.shutil, "which", lambda name: None)
    with pytest.raises(VitsweepError, match="`sbatch`"):
        machine()
