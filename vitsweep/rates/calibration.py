"""The calibration of a device: what was measured on it, kept as a file of the user (no torch).

It lies in `$XDG_CONFIG_HOME/vitsweep/calibrations` (`~/.config/...`), one file per device. Times of operators
are used for the same device and minor version of torch only, and a notice says so where they are not;
quick rates, which every run is recorded beside, for an hour.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitsweep.files import home_folder, write_atomically, write_cache_file
from vitsweep.foreign import parsed_json
from vitsweep.rates.profile import processor

SCHEMA = 1
WAY = 2
"""Number of the way in which operators of a plan are timed; what was timed in another way is timed anew."""
QUICK_MAX_AGE_S = 3600
"""Quick rates older than this are measured again: load and clocks of a machine change."""


BY_WEIGHT = "mm.t"
"""A product whose left side is transposed: the gradient of a weight, gradient.t() @ input. Its rate may be
ten times that of the gradient of the input, where a CPU emulates the format."""
Shapes = Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]
"""dtype -> (name, shape) of products (`addmm`, `mm`, `mm.t`, `bmm`) and of `attention`, shapes as in
`predict.step_time.OperatorTotal`; `tf32`: products of float32 in that format."""

Exchanges = Sequence[tuple[str, str, int]]
"""(name, dtype, bytes of the whole tensor) of collectives."""
FRESH = "fresh memory"
"""Name of what stands among the operators for memory that the system provides when it is written first."""


MEASURE = (
    "import json; from vitsweep.rates.reached import matmul_gflops_per_core as f; "
    "print(json.dumps(f()))"
)


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Rates under one number of ranks on a node, which share its cores and its memory bandwidth.

    Attributes:
        ranks: ranks at work on the node while it was measured.
        threads: of each rank.
        operators: as `operators.operator_times` returns them.
        collectives: as `operators.collective_times` returns them.
        dispatch_us: host time of one dispatched operator beside what the operators take alone.
        scale: computing time in training steps relative to operators alone.
        message_us: what each exchange adds within a step: ranks wait for one another and for cores.
        sent_scale: time of an exchange within a step relative to it alone.
        sent_error: standard deviation of log(measured / predicted) of the exchange.
        log_error: the same of a step that is measured once more.
        degrees: of freedom of that.
        step_ms: shortest and longest of the steps that gave all these.
    """

    ranks: int
    threads: int
    operators: Sequence[dict[str, Any]]
    collectives: Sequence[dict[str, Any]]
    dispatch_us: float = 0.0
    scale: float = 1.0
    message_us: float = 0.0
    sent_scale: float = 1.0
    sent_error: float = 0.2
    log_error: float = 0.1
    degrees: float = 5.0
    step_ms: tuple[float, float] = (0.0, math.inf)


Timed = dict[str, Any]
NOT_TIMED: Timed = {"operators": [], "collectives": []}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates of one device.

    Attributes:
        device: its name, with its instructions (see `rates.profile`).
        device_type: `cpu` or `cuda`.
        torch: version that timed the operators.
        date: day of that measurement, ISO 8601.
        cores: of the node.
        setups: times of operators by number of ranks.
        matmul: GFLOP/s of one CPU core by dtype, see `rates.reached.matmul_gflops_per_core`.
        timed: ranks, threads and torch (see `timed_key`) -> times of operators at the shapes of planned
            cells, and of collectives, as in `RankSetup`.
        quick: host, ranks and threads -> what `rates.reached.calibrate` returned, and `time`, when it did.
    """

    device: str
    device_type: str = ""
    torch: str = ""
    date: str = ""
    cores: int = 0
    setups: tuple[RankSetup, ...] = ()
    matmul: dict[str, float] = field(default_factory=dict)
    timed: dict[str, Timed] = field(default_factory=dict)
    quick: dict[str, dict[str, float]] = field(default_factory=dict)

    def save(self) -> Path:
        """Write the file of this device; return its path."""
        write_atomically(path_for(self.device), self._text())
        return path_for(self.device)

    def keep_timed(self, key: str, times: Timed) -> "Calibration":
        """Keep times of operators, and drop those of another torch, processor or way to time them.

        Where nothing can be written nothing is kept.
        """
        hold = key.partition(" ")[2]
        timed = {k: v for k, v in self.timed.items() if k.partition(" ")[2] == hold}
        found = replace(self, timed=timed | {key: times})
        write_cache_file(path_for(self.device), found._text().encode())
        return found

    def keep_quick(self, key: str, rates: dict[str, float]) -> None:
        """Keep quick rates, and drop those that are too old; where nothing can be written nothing is kept."""
        new = {key: rates | {"time": time.time()}}
        kept = replace(self, quick={k: v for k, v in self.quick.items() if _is_young(v)} | new)
        write_cache_file(path_for(self.device), kept._text().encode())

    def quick_rates(self, key: str) -> dict[str, float]:
        """Return the rates of the last hour; {} where there are none."""
        found = self.quick.get(key, {})
        return {k: v for k, v in found.items() if k != "time"} if _is_young(found) else {}

    def _text(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)


def path_for(device: str) -> Path:
    """Return the file of a device."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return base / "vitsweep" / "calibrations" / f"{name}.json"


def kept_calibration(device: str) -> Calibration:
    """Return what is kept of a device, which may be nothing.

    Raises:
        ValueError: the file is damaged, or of another device.
    """
    path = path_for(device)
    if not path.is_file():
        return Calibration(device=device)
    try:
        tree = parsed_json(path.read_text(encoding="utf-8"))
        if tree.pop("schema") != SCHEMA:
            raise ValueError("another version of vitsweep wrote it")
        found = Calibration(**tree | {"setups": tuple(RankSetup(**s) for s in tree["setups"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The calibration `{path}` is damaged ({error}) and not used") from error
    if found.device != device:
        raise ValueError(f"The calibration `{path}` is of {found.device}, not of {device}")
    return found


def timed_key(ranks: int, threads: int) -> str:
    """Return what must be equal for times of operators to hold.

    The name of a processor does not tell its generation on every virtual machine; its numbers do.
    """
    return f"{ranks}x{threads} torch {torch_here()} on {processor()}, way {WAY}"


@cache
def torch_here() -> str:
    """Return the version of torch, without importing it; to look it up takes milliseconds."""
    return version("torch")


def load_calibration(device: str, torch_version: str) -> tuple[Calibration | None, str]:
    """Return (calibration of a device, notice), or (None, why it is not used).

    Args:
        device: name of the processor or GPU.
        torch_version: that of the cells; another minor version has other kernels.
    """
    path = path_for(device)
    again = "run `python -m vitsweep doctor --calibrate` (3 minutes)"
    try:
        found = kept_calibration(device)
    except ValueError as error:
        return None, f"{error}: {again}."
    if not found.setups:
        return None, f"No calibration of {device} is known here: {again} for narrower intervals."
    if _minor(found.torch) != _minor(torch_version):
        return None, (
            f"The calibration `{path}` was made with torch {found.torch}, this is {torch_version}, "
            f"whose kernels may be faster or slower: it is not used, {again}."
        )
    age = (datetime.now().date() - datetime.fromisoformat(found.date).date()).days
    return found, f"The calibration `{path}` is {age} days old." if age > 30 else ""


def matmul_rates(device: str, *, measure: bool = False) -> dict[str, float]:
    """Return GFLOP/s of one core by dtype: as kept for a device, or measured now, in a process of its own.

    Args:
        device: name of this machine's processor.
        measure: measure and keep them where none are kept; else {} is returned then.
    """
    try:
        kept = kept_calibration(device)
    except ValueError:
        kept = Calibration(device=device)
    if known := kept.matmul or _of_quick(kept):
        return known
    if not measure:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], capture_output=True, check=True, timeout=120
        )
        rates = {name: float(rate) for name, rate in json.loads(done.stdout).items()}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    write_cache_file(path_for(device), replace(kept, matmul=rates)._text().encode())
    return rates


def _of_quick(kept: Calibration) -> dict[str, float]:
    """Return the same from the latest quick rates, which a run measured; {} without any."""
    if not kept.quick or kept.device_type == "cuda":
        return {}
    key, rates = max(kept.quick.items(), key=lambda item: item[1].get("time", 0.0))
    threads = int(key.rpartition("x")[2])
    return {d: 1e3 * rates[d] / threads for d in ("float32", "bfloat16", "float16") if d in rates}


def _is_young(rates: dict[str, float]) -> bool:
    return abs(time.time() - rates.get("time", 0.0)) < QUICK_MAX_AGE_S  # the clock may be set back


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
