"""The calibration of a machine: measured, kept as a file of the user, read when step times are predicted.

It lies in `$XDG_CONFIG_HOME/vitsweep/calibrations` (`~/.config/...`), one file per device; it is used for
the same device and minor version of torch only, and a notice says so where it is not.
"""

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vitsweep.predict.measured_rates import CalibratedRates, RankSetup
from vitsweep.spec.cell_spec import CellSpec

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates of one machine.

    Attributes:
        device: name of the processor or GPU.
        device_type: `cpu` or `cuda`.
        torch: its version.
        date: day of the measurement, ISO 8601.
        cores: of the node.
        setups: rates by number of ranks.
    """

    device: str
    device_type: str
    torch: str
    date: str
    cores: int
    setups: tuple[RankSetup, ...]

    def rates_for(self, cell: CellSpec) -> CalibratedRates:
        """Return rates for the ranks of a cell, from the nearest number of ranks."""
        resources = cell.resources
        wanted = resources.ranks_per_node
        setup = min(self.setups, key=lambda s: (abs(math.log(wanted / s.ranks)), s.ranks))
        return CalibratedRates(
            setup,
            ranks_per_node=wanted,
            threads=resources.threads_per_rank,
            cores=self.cores,
            title=f"{self.device}, calibrated on {self.date}",
            asynchronous=self.device_type == "cuda",
        )

    def save(self) -> Path:
        """Write the file of this device; return its path."""
        from vitsweep.files import write_atomically

        path = path_for(self.device)
        write_atomically(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))
        return path


def path_for(device: str) -> Path:
    """Return the file of a device."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return base / "vitsweep" / "calibrations" / f"{name}.json"


def load_calibration(device: str, torch_version: str) -> tuple[Calibration | None, str]:
    """Return (calibration of a device, notice), or (None, why it is not used).

    Args:
        device: name of the processor or GPU.
        torch_version: that of the cells; another minor version has other kernels.
    """
    path = path_for(device)
    again = "run `python -m vitsweep doctor --calibrate` (3 minutes)"
    if not path.is_file():
        return None, f"No calibration of {device} is known here: {again} for narrower intervals."
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        found = _from_tree(tree)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"The calibration `{path}` is damaged ({error}) and not used: {again}."
    if found.device != device:
        return None, f"The calibration `{path}` is of {found.device}, not of {device}: {again}."
    if _minor(found.torch) != _minor(torch_version):
        return None, (
            f"The calibration `{path}` was made with torch {found.torch}, this is {torch_version}, "
            f"whose kernels may be faster or slower: it is not used, {again}."
        )
    age = (datetime.now().date() - datetime.fromisoformat(found.date).date()).days
    return found, f"The calibration `{path}` is {age} days old." if age > 30 else ""


def _from_tree(tree: dict[str, Any]) -> Calibration:
    if tree.pop("schema") != SCHEMA:
        raise ValueError("another version of vitsweep wrote it")
    setups = tuple(RankSetup(**setup) for setup in tree.pop("setups"))
    if not setups:
        raise ValueError("it holds no measurement")
    return Calibration(**tree, setups=setups)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
