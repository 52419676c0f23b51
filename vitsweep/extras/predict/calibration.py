"""Times of operators in the calibration of a device (no torch).

They are used for the same device and minor version of torch only, and a notice says so where they are not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitsweep.files import write_atomically, write_cache_file
from vitsweep.rates.calibration import KeptRates, damaged, kept_rates, path_for
from vitsweep.rates.profile import processor

WAY = 2
"""Number of the way in which operators of a plan are timed; what was timed in another way is timed anew."""
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
class Calibration(KeptRates):
    """Measured rates of one device, and times of operators.

    Attributes:
        torch: version that timed the operators.
        date: day of that measurement, ISO 8601.
        cores: of the node.
        setups: times of operators by number of ranks.
        timed: ranks, threads and torch (see `timed_key`) -> times of operators at the shapes of planned
            cells, and of collectives, as in `RankSetup`.
    """

    torch: str = ""
    date: str = ""
    cores: int = 0
    setups: tuple[RankSetup, ...] = ()
    timed: dict[str, Timed] = field(default_factory=dict)

    def save(self) -> Path:
        """Write the file of this device; return its path."""
        write_atomically(path_for(self.device), self.text())
        return path_for(self.device)

    def keep_timed(self, key: str, times: Timed) -> "Calibration":
        """Keep times of operators, and drop those of another torch, processor or way to time them.

        Where nothing can be written nothing is kept.
        """
        hold = key.partition(" ")[2]
        timed = {k: v for k, v in self.timed.items() if k.partition(" ")[2] == hold}
        found = replace(self, timed=timed | {key: times})
        write_cache_file(path_for(self.device), found.text().encode())
        return found


def kept_calibration(device: str) -> Calibration:
    """Return what is kept of a device, which may be nothing.

    Raises:
        ValueError: the file is damaged, or of another device.
    """
    found = kept_rates(device)
    try:
        own = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "others"}
        setups = tuple(RankSetup(**s) for s in found.others.get("setups", ()))
        return Calibration(**own | found.others | {"setups": setups})
    except (TypeError, AttributeError) as error:
        raise damaged(device, error) from error


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


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
