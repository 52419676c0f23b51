"""The calibration of a device: what was measured on it, kept as a file of the user (no torch).

It lies in `$XDG_CONFIG_HOME/vitsweep/calibrations` (`~/.config/...`), one file per device. Quick rates, which
every run is recorded beside, are used for an hour.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitsweep.files import home_folder, write_cache_file
from vitsweep.foreign import parsed_json

SCHEMA = 1
QUICK_MAX_AGE_S = 3600
"""Quick rates older than this are measured again: load and clocks of a machine change."""


MEASURE = (
    "import json; from vitsweep.rates.reached import matmul_gflops_per_core as f; "
    "print(json.dumps(f()))"
)


@dataclass(frozen=True, kw_only=True)
class KeptRates:
    """Measured rates of one device.

    Attributes:
        device: its name, with its instructions (see `rates.profile`).
        device_type: `cpu` or `cuda`.
        matmul: GFLOP/s of one CPU core by dtype, see `rates.reached.matmul_gflops_per_core`.
        quick: host, ranks and threads -> what `rates.reached.calibrate` returned, and `time`, when it did.
        others: what optional features keep in the file.
    """

    device: str
    device_type: str = ""
    matmul: dict[str, float] = field(default_factory=dict)
    quick: dict[str, dict[str, float]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def keep_quick(self, key: str, rates: dict[str, float]) -> None:
        """Keep quick rates, and drop those that are too old."""
        young = {k: v for k, v in self.quick.items() if _is_young(v)}
        replace(self, quick=young | {key: rates | {"time": time.time()}}).keep()

    def quick_rates(self, key: str) -> dict[str, float]:
        """Return the rates of the last hour; {} where there are none."""
        found = self.quick.get(key, {})
        return {k: v for k, v in found.items() if k != "time"} if _is_young(found) else {}

    def keep(self) -> None:
        """Write the file of this device; where nothing can be written nothing is kept."""
        tree = asdict(self)
        text = json.dumps({"schema": SCHEMA, **tree.pop("others"), **tree}, indent=1)
        write_cache_file(path_for(self.device), text.encode())


def path_for(device: str) -> Path:
    """Return the file of a device."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return base / "vitsweep" / "calibrations" / f"{name}.json"


def kept_rates(device: str) -> KeptRates:
    """Return what is kept of a device, which may be nothing.

    Raises:
        ValueError: the file is damaged, or of another device.
    """
    path = path_for(device)
    if not path.is_file():
        return KeptRates(device=device)
    try:
        tree = parsed_json(path.read_text(encoding="utf-8"))
        if tree.pop("schema") != SCHEMA:
            raise ValueError("another version of vitsweep wrote it")
        own = {f.name: tree.pop(f.name) for f in fields(KeptRates) if f.name in tree}
        found = KeptRates(**own, others=tree)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{path}`, which keeps rates of this machine, is damaged ({error}): remove it"
        ) from error
    if found.device != device:
        raise ValueError(f"`{path}` keeps rates of {found.device}, not of {device}: remove it")
    return found


def matmul_rates(device: str, *, measure: bool = False) -> dict[str, float]:
    """Return GFLOP/s of one core by dtype: as kept for a device, or measured now, in a process of its own.

    Args:
        device: name of this machine's processor.
        measure: measure and keep them where none are kept; else {} is returned then.
    """
    try:
        kept = kept_rates(device)
    except ValueError:
        kept = KeptRates(device=device)
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
    replace(kept, matmul=rates).keep()
    return rates


def _of_quick(kept: KeptRates) -> dict[str, float]:
    """Return the same from the latest quick rates, which a run measured; {} without any."""
    if not kept.quick or kept.device_type == "cuda":
        return {}
    key, rates = max(kept.quick.items(), key=lambda item: item[1].get("time", 0.0))
    threads = int(key.rpartition("x")[2])
    return {d: 1e3 * rates[d] / threads for d in ("float32", "bfloat16", "float16") if d in rates}


def _is_young(rates: dict[str, float]) -> bool:
    return abs(time.time() - rates.get("time", 0.0)) < QUICK_MAX_AGE_S  # the clock may be set back
