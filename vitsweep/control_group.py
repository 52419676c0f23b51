"""What the kernel says of the control group of this process, cgroups(7): its CPU quota and memory kills.

Both versions are read. Groups above the own one count as far as they are mounted here: a container sees
those of its own name space.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc/self")


def allowed_cores() -> int:
    """Return how many cores this process may use: its affinity or its CPU quota rounded down, at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota() or float("inf"))))


def cpu_quota() -> float | None:
    """Return how many CPUs this process may use on average; None where no group has a quota.

    It is the least of the quotas of its control group and of all above: `cpu.max` (version 2), or
    `cpu.cfs_quota_us / cpu.cfs_period_us` (version 1).
    """
    quotas = []
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError):
            if (both := folder / "cpu.max").exists():
                quota, period = both.read_text(encoding="utf-8").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
            if quota != "max" and int(quota) > 0:  # -1 is none in version 1
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def throttled_seconds() -> float | None:
    """Return how long quotas have held back this control group and those above, summed over cores.

    The counter is `throttled_usec` (version 2) or `throttled_time` (version 1, ns) of `cpu.stat`.

    Returns:
        None where the system does not say.
    """
    units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
    counters = [_counters(folder / "cpu.stat") for folder in _groups("cpu")]
    found = [of[name] * unit for of in counters for name, unit in units.items() if name in of]
    return sum(found) if found else None


def num_oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for their memory.

    The counter is `oom_kill` of `memory.events` (version 2), or of `memory.oom_control` (version 1).

    Returns:
        None where the system does not say.
    """
    for folder in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if "oom_kill" in (counters := _counters(folder / name)):
                return counters["oom_kill"]
    return None


def _counters(file: Path) -> dict[str, int]:
    """Return name -> number of a file of such lines; empty where it cannot be read."""
    try:
        pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above, of both versions.

    A mount shows a part of the tree of groups: that below its root (proc_pid_mountinfo(5)).
    """
    try:
        groups = (PROC / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (PROC / "mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    path_of = {
        name: path
        for _, names, path in (line.split(":", 2) for line in groups)
        for name in names.split(",")
    }
    for mount in mounts:
        of_mount, _, of_system = mount.partition(" - ")
        (_, _, _, root, top, *_), (kind, *_, options) = of_mount.split(), of_system.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            path = path_of.get("" if kind == "cgroup2" else controller, "")
            inside = os.path.relpath(path, root) if path.startswith(root) else "."
            own = Path(top, *() if inside.startswith("..") else (inside,))
            yield from (own, *own.parents[: len(own.parents) - len(Path(top).parents)])
