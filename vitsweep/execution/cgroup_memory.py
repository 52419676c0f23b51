"""Kills by the kernel because the memory of this process's control group ran out."""

from contextlib import suppress
from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for their memory.

    The counter is `oom_kill` of `memory.events` (version 2), or of `memory.oom_control` (version 1).

    Returns:
        None where the system does not say.
    """
    with suppress(OSError, ValueError):
        for line in PROC.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                file = ROOT / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                file = ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
            else:
                continue
            if file.exists():
                pairs = dict(
                    entry.split() for entry in file.read_text(encoding="utf-8").splitlines()
                )
                return int(pairs["oom_kill"]) if "oom_kill" in pairs else None
    return None
