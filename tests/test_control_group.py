"""CPU quotas and memory kills of control groups: of one that the kernel holds back, and of made files."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from vitsweep import control_group
from vitsweep.control_group import allowed_cores, cpu_quota, num_oom_kills, throttled_seconds

CORES = len(os.sched_getaffinity(0))
QUOTA, PERIOD = 5_000, 100_000
"""Microseconds: a twentieth of a CPU, less than a process gets on a crowded machine."""

PROGRAM = """
import json, sys
from pathlib import Path
from vitsweep.control_group import throttled_seconds
from vitsweep.spec.resources import Machine
Path(sys.argv[1], "cgroup.procs").write_text("0")  # this process
before = throttled_seconds()
while throttled_seconds() == before:
    pass
machine = Machine.here()
print(json.dumps([machine.cpu_quota, machine.cores_per_node, machine.quota_notice]))
"""


@pytest.fixture
def small_share() -> Iterator[Path]:
    """A control group inside one that has a quota."""
    version_1 = Path("/sys/fs/cgroup/cpu")
    root = version_1 if version_1.exists() else Path("/sys/fs/cgroup")
    folder = root / f"vitsweep_test_{os.getpid()}"
    try:
        (folder / "inner").mkdir(parents=True)
        if version_1.exists():
            (folder / "cpu.cfs_period_us").write_text(f"{PERIOD}")
            (folder / "cpu.cfs_quota_us").write_text(f"{QUOTA}")
        else:
            (folder / "cpu.max").write_text(f"{QUOTA} {PERIOD}")
    except OSError as error:
        pytest.skip(f"needs a control group with a CPU quota: {error}")
    yield folder / "inner"
    (folder / "inner").rmdir()
    folder.rmdir()


def test_a_part_of_a_cpu_is_one_core_and_what_it_holds_back_is_counted(small_share: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, small_share], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    quota, cores, notice = json.loads(done.stdout)
    assert (quota, cores) == (QUOTA / PERIOD, 1)
    assert "0.05" in notice
    assert "`resources.threads_per_rank=auto`" in notice


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for made files of the system."""
    monkeypatch.setattr(control_group, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    return tmp_path


def write(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> None:
    """Write the two lists of the process, in which `@` is the root of all mounts, and files below it."""
    (root / "cgroup").write_text(groups)
    (root / "mountinfo").write_text(mounts.replace("@", str(root)))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = "30 23 0:26 / @/two rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "29 23 0:25 / @ rw - tmpfs tmpfs rw,mode=755\n"
    "31 23 0:28 / @/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:29 / @/memory rw - cgroup cgroup rw,memory\n"
)
INSIDE = "31 23 0:28 /docker/7 @/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
"""As a container of version 1 without a name space of its own sees it."""


def test_the_least_quota_of_all_groups_above_counts(made: Path) -> None:
    """Of the own group, of one above it, of one whose mount shows a part of the tree; rounded down."""
    above = {"two/cpu.max": "400000 100000\n", "two/job/cpu.max": "350000 100000\n"}
    cases = [
        ("0::/job/step\n", V2, {**above, "two/job/step/cpu.max": "max 100000\n"}, 3.5, 3),
        ("0::/job/step\n", V2, {"two/job/step/cpu.max": "20000 100000\n"}, 0.2, 1),
        ("0::/../other\n", V2, {}, 4.0, 4),
        ("4:cpu,cpuacct:/a/b\n3:memory:/\n", V1, {
            "cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n",
            "cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n",
        }, 2.5, 2),
        ("4:cpu,cpuacct:/docker/7\n0::/\n", INSIDE + V2.replace("two", "none"), {
            "cpu/cpu.cfs_quota_us": "900000\n", "cpu/cpu.cfs_period_us": "100000\n",
        }, 9.0, 8),
        ("4:cpu,cpuacct:/docker/70\n", INSIDE, {}, 9.0, 8),
        ("0::/\n", V2, {"two/cpu.max": "damaged\n"}, None, 8),
        ("", "", {}, None, 8),
    ]  # fmt: skip
    for groups, mounts, files, quota, cores in cases:
        write(made, groups, mounts, files)
        assert (cpu_quota(), allowed_cores()) == (quota, cores), (groups, mounts)
    (made / "mountinfo").unlink()
    assert (cpu_quota(), allowed_cores(), throttled_seconds()) == (None, 8, None)


def test_what_was_held_back_is_that_of_all_groups_above(made: Path) -> None:
    counts = "nr_periods 9\nnr_throttled 2\n"
    write(made, "0::/job\n", V2, {"two/cpu.stat": "usage_usec 7\n", "two/job/cpu.stat": counts})
    assert throttled_seconds() is None
    write(made, "0::/job/a\n", V2, {"two/job/cpu.stat": f"{counts}throttled_usec 2000000\n",
                                    "two/job/a/cpu.stat": f"{counts}throttled_usec 500000\n"})  # fmt: skip
    assert throttled_seconds() == pytest.approx(2.5)
    write(made, "4:cpu,cpuacct:/a\n", V1, {"cpu/a/cpu.stat": f"{counts}throttled_time 1500000000"})
    assert throttled_seconds() == pytest.approx(1.5)


def test_memory_kills_are_counted_in_both_versions(made: Path) -> None:
    of_two = {"two/job_7/step_0/memory.events": "low 0\nmax 9\noom 2\noom_kill 2\n"}
    write(made, "0::/job_7/step_0\n", V2, of_two)
    assert num_oom_kills() == 2
    of_one = {"memory/slurm/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    write(made, "9:cpu:/\n4:memory:/slurm\n0::/\n", V1, of_one)
    assert num_oom_kills() == 3
    (made / "memory/slurm/memory.oom_control").unlink()
    assert num_oom_kills() is None
