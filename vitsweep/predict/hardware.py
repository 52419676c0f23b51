"""Devices that need not be here: their rates and their network, each figure with its source.

A profile is a YAML file (`profiles/*.yaml`, or one of your own):

    name: my GPU
    peaks_of: A100 SXM    # a device of `vitsweep/measure/hardware.py`, or peak_tflops: {bfloat16: 312}
    figures:              # scalars, or tables {where: value} that are read between their points
      memory_tb_s: {value: 2.0, source: data sheet, confidence: published}

`confidence` is `measured` (a benchmark of that device), `published` (a data sheet), `derived` (computed
from others, or taken from a similar device) or `assumed`. What a file leaves out is taken from
`profiles/generic_gpu.yaml`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from vitsweep.composition.suggestions import did_you_mean
from vitsweep.errors import BadValueError
from vitsweep.measure.hardware import PEAKS
from vitsweep.predict.interpolate import Curve
from vitsweep.predict.profile_checks import Confidence, problems

PROFILES = Path(__file__).parent / "profiles"
GENERIC = "generic_gpu"


@dataclass(frozen=True)
class Figure:
    """One number, or one table of numbers.

    Attributes:
        value: a number, or {position: number}, read between its points (see `Curve`).
        source: where it is published or measured.
        confidence: how sure it is.
    """

    value: float | dict[str, float]
    source: str
    confidence: Confidence


@dataclass(frozen=True)
class Hardware:
    """One device, its node and its network.

    Attributes:
        name: as typed after `--hardware`.
        title: its full name.
        peak_tflops: dtype of the products -> dense peak.
        figures: name -> figure; the units are in the names.
        drivers_name: regular expression of the name that the driver reports; "" if unknown.
    """

    name: str
    title: str
    peak_tflops: Mapping[str, float]
    figures: Mapping[str, Figure]
    drivers_name: str = ""
    _curves: dict[str, Curve] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, figure: str) -> float:
        """Return a scalar figure.

        Raises:
            KeyError: the profile has no such scalar.
        """
        value = self.figures[figure].value
        if isinstance(value, dict):
            raise KeyError(f"{figure} is a table")
        return float(value)

    def get(self, figure: str) -> float | None:
        """Return a scalar figure, or None where the profile has none."""
        return self[figure] if figure in self.figures else None

    def at(self, table: str, position: float) -> float:
        """Read a table between its points, on logarithmic scales."""
        if table not in self._curves:
            points = self.figures[table].value
            assert isinstance(points, dict), f"{table} is a scalar"
            self._curves[table] = Curve({float(x): float(y) for x, y in points.items()})
        return self._curves[table](position)

    def matmul_fraction(self, dtype: str) -> float:
        """Share of the dense peak that the best shape of a product reaches."""
        fractions = self.figures["matmul_fraction"].value
        assert isinstance(fractions, dict)
        similar = (dtype, "bfloat16", "float16")
        return next((fractions[d] for d in similar if d in fractions), min(fractions.values()))

    @cached_property
    def usable_bytes(self) -> float:
        """Memory that tensors may take: without the driver's context and the buffers of NCCL."""
        return (self["memory_gib"] - self["reserved_gib"]) * 2**30

    @property
    def has_sourced_matmul_rate(self) -> bool:
        """Whether somebody measured which share of the peak products reach on this device."""
        return self.figures["matmul_fraction"].confidence == "measured"

    @property
    def price_usd_per_hour(self) -> tuple[float, float] | None:
        """Lowest and highest price of one device per hour, or None."""
        low, high = self.get("price_low_usd_per_hour"), self.get("price_high_usd_per_hour")
        return (low, high) if low is not None and high is not None else None


def known_hardware() -> list[str]:
    """Return the names that `--hardware` takes."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml") if path.stem != GENERIC)


@cache
def hardware_named(name: str) -> Hardware:
    """Return a device by its name, or read the profile file at a path.

    Raises:
        BadValueError: there is no such device and no such file, or the file is no profile.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BadValueError(f"`--hardware {name}`: there is no file `{path.absolute()}`.")
        return _read(path, path.stem)
    known = known_hardware()
    if name.lower() not in known:
        raise BadValueError(
            f"`--hardware {name}`: unknown device; known are {', '.join(known)}."
            + did_you_mean(name, known, lambda device: f"--hardware {device}")
            + f" For another device write a profile file: copy one of {PROFILES}, change its figures and "
            "give its path, `--hardware my_gpu.yaml`; what you leave out is taken from "
            f"{GENERIC}.yaml there."
        )
    return _read(PROFILES / f"{name.lower()}.yaml", name.lower())


@cache
def generic_gpu() -> Hardware:
    """Return a GPU of which nothing is known: an A100's peaks, with intervals of assumed figures."""
    return _read(PROFILES / f"{GENERIC}.yaml", GENERIC)


def hardware_of_device(device_name: str, memory_gib: float | None = None) -> Hardware | None:
    """Return the profile of a device by the name that its driver reports; None if there is none.

    Args:
        device_name: such as `NVIDIA H100 80GB HBM3`.
        memory_gib: tells variants of one chip apart; None takes what the name says.
    """
    matching = [
        hardware
        for hardware in map(hardware_named, known_hardware())
        if hardware.drivers_name
        and re.fullmatch(hardware.drivers_name, device_name.strip(), re.IGNORECASE)
    ]
    named = re.search(r"(\d+) ?GB", device_name, re.IGNORECASE)
    if memory_gib is None and named:
        memory_gib = float(named[1])
    if memory_gib is None:
        return matching[0] if matching else None
    return min(matching, key=lambda h: abs(h["memory_gib"] - memory_gib), default=None)


LARGER_VARIANTS = 1.2
"""Memory of the largest variant that a short name may stand for, over that of the profile: there are H100s
of 80, 94 and 96 GB."""


def most_usable_bytes(gpu_type: str) -> float | None:
    """Return the memory that tensors may take on the largest GPU of that type; None if it is unknown.

    Args:
        gpu_type: as Slurm names it: `a100`, or the driver's name as its autodetection writes it,
            `nvidia_a100-sxm4-80gb`.
    """
    text = gpu_type.lower()
    exact = hardware_of_device(text.replace("_", " "))
    if exact:
        return exact.usable_bytes
    matching = [
        hardware_named(name) for name in known_hardware() if f"{name}_".startswith(f"{text}_")
    ]
    if not text or not matching:
        return None
    return LARGER_VARIANTS * max(hardware.usable_bytes for hardware in matching)


def _read(path: Path, name: str) -> Hardware:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise _no_profile(path, [str(error)]) from error
    if not isinstance(tree, dict):
        raise _no_profile(path, [f"it holds {str(tree)[:40]!r} instead of keys with values"])
    base = {} if name == GENERIC else generic_gpu().figures
    known = {key: isinstance(figure.value, dict) for key, figure in base.items()}
    found = list(problems(tree, known)) if base else []
    by_device = {peak.device: peak for peak in PEAKS}
    like = tree.get("peaks_of")
    if like is not None and like not in by_device:
        found.append(f"`peaks_of: {like}` is none of {', '.join(by_device)}")
    if found:
        raise _no_profile(path, found)
    figures = {key: _figure(node) for key, node in (tree.get("figures") or {}).items()}
    if base:
        _require(path, tree, figures)
    peak = by_device.get(str(like))
    peaks = dict(tree.get("peak_tflops") or {}) | (dict(peak.tflops) if peak else {})
    hardware = Hardware(
        name=name,
        title=str(tree.get("name", name)),
        peak_tflops={dtype: float(value) for dtype, value in peaks.items()},
        figures={**base, **figures},
        drivers_name=str(tree.get("drivers_name") or (peak.pattern if peak else "")),
    )
    if hardware.usable_bytes <= 0:
        raise _no_profile(path, ["`reserved_gib` leaves nothing of `memory_gib`"])
    return hardware


def _no_profile(path: Path, faults: Sequence[str]) -> BadValueError:
    return BadValueError(
        f"`{path}` is no hardware profile: {'; '.join(faults)}. It needs `name`, `peaks_of` or "
        "`peak_tflops`, and `figures` with `value`, `source` and `confidence` each: see "
        f"{PROFILES / 'h100.yaml'}, and {PROFILES / GENERIC}.yaml for all figures."
    )


def _require(path: Path, tree: Mapping[str, Any], figures: Mapping[str, Figure]) -> None:
    lacking = [key for key in ("memory_gib", "memory_tb_s") if key not in figures]
    lacking += ["peaks_of or peak_tflops"] * (not {"peaks_of", "peak_tflops"} & set(tree))
    if lacking:
        raise BadValueError(f"`{path}` lacks {', '.join(lacking)}: no other device has the same.")


def _figure(node: Mapping[str, Any]) -> Figure:
    value = node["value"]
    if isinstance(value, dict):
        value = {str(k): float(v) for k, v in value.items()}
    else:
        value = float(value)
    return Figure(value, str(node["source"]), node["confidence"])
