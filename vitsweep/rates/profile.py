"""Devices that need not be here: their rates and their network, each figure with its source.

A profile is a YAML file (`profiles/*.yaml`, or one of your own):

    name: my GPU
    peaks_of: A100 SXM    # a device of `vitsweep/rates/profile.py`, or peak_tflops: {bfloat16: 312}
    figures:              # scalars, or tables {where: value} that are read between their points
      memory_tb_s: {value: 2.0, source: data sheet, confidence: published}

`confidence` is `measured` (a benchmark of that device), `published` (a data sheet), `derived` (computed
from others, or taken from a similar device) or `assumed`. What a file leaves out is taken from
`profiles/generic_gpu.yaml`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from vitsweep.errors import BadValueError, did_you_mean
from vitsweep.rates.interpolate import Curve

# What a hardware profile must hold, so that a wrong file is refused before anything is traced.


Confidence = Literal["measured", "published", "derived", "assumed"]
FLOAT_FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8")
KEYS = ("name", "peaks_of", "peak_tflops", "figures", "drivers_name")
PRICES = ("price_low_usd_per_hour", "price_high_usd_per_hour")
BY_FORMAT = "matmul_fraction"
"""The table whose positions are number formats."""
WHOLE = ("multiprocessors", "devices_per_node")
MAY_BE_ZERO = (
    *PRICES, "reserved_gib", "kernel_us", "dispatch_us", "fabric_pass_us", "overlap_charge_link",
    "overlap_charge_fabric",
)  # fmt: skip


def problems(tree: Mapping[str, Any], tables: Mapping[str, bool]) -> Iterator[str]:
    """Yield what is wrong with a profile, as parts of a sentence.

    Args:
        tree: the file.
        tables: figure that a profile may have -> whether it is a table; prices are known besides.
    """
    for key in tree:
        if key not in KEYS:
            yield _unknown(f"`{key}`", str(key), KEYS)
    yield from _peak_problems(tree.get("peak_tflops"))
    kinds = dict(tables) | dict.fromkeys(PRICES, False)
    figures = tree.get("figures") or {}
    if not isinstance(figures, dict):
        yield f"`figures: {figures}` is no list of named figures"
        return
    for name, node in figures.items():
        if name not in kinds:
            yield _unknown(f"`figures.{name}`", str(name), list(kinds))
        else:
            yield from _figure_problems(str(name), node, kinds[name])
    priced = [name for name in PRICES if name in figures]
    if len(priced) == 1:
        [lacking] = set(PRICES) - set(priced)
        yield f"`{priced[0]}` needs `{lacking}` beside it, which may be the same"


def _unknown(shown: str, name: str, known: Any) -> str:
    hint = did_you_mean(name, list(known), str).strip()
    return f"{shown} is nothing that a profile has. {hint}".strip().rstrip(".")


def _peak_problems(peaks: Any) -> Iterator[str]:
    if peaks is None:
        return
    if not isinstance(peaks, dict):
        yield f"`peak_tflops: {peaks}` is not {{format: TFLOP/s}}, like {{float32: 19.5, bfloat16: 312}}"
        return
    for name, value in peaks.items():
        if name not in FLOAT_FORMATS:
            yield f"`peak_tflops.{name}` is none of {', '.join(FLOAT_FORMATS)}"
        elif problem := _number_problem(f"peak_tflops.{name}", value):
            yield problem
    if "float32" not in peaks:
        yield "`peak_tflops` lacks `float32`, from which the rate of any other format is no estimate"


def _figure_problems(name: str, node: Any, is_table: bool) -> Iterator[str]:
    if not isinstance(node, dict) or {"value", "source", "confidence"} - set(node):
        yield f"`{name}` needs `value`, `source` and `confidence`"
        return
    if node["confidence"] not in get_args(Confidence):
        yield f"`{name}.confidence: {node['confidence']}` is none of {', '.join(get_args(Confidence))}"
    value = node["value"]
    if isinstance(value, dict) != is_table:
        kind = "a table {position: number}" if is_table else "one number"
        yield f"`{name}.value: {value}` must be {kind}"
    elif is_table:
        yield from _table_problems(name, value)
    elif problem := _number_problem(name, value):
        yield problem
    elif name in WHOLE and float(value) % 1:
        yield f"`{name}: {value}` must be a whole number"


def _table_problems(name: str, table: Mapping[Any, Any]) -> Iterator[str]:
    if not table:
        yield f"`{name}` is an empty table"
    for position, value in table.items():
        if name == BY_FORMAT and position not in FLOAT_FORMATS:
            yield f"`{name}.{position}` is none of {', '.join(FLOAT_FORMATS)}"
        elif name != BY_FORMAT and (
            problem := _number_problem(f"{name}, position", position, "position")
        ):
            yield problem
        elif problem := _number_problem(f"{name}.{position}", value, name):
            yield problem


def _number_problem(shown: str, value: Any, figure: str = "") -> str:
    """Return why a value is no figure; "" where it is one."""
    name = figure or shown
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"`{shown}: {value}` is no number"
    if isinstance(value, bool) or not isfinite(number):
        return f"`{shown}: {value}` is no number"
    if number < 0 or (number == 0 and name not in MAY_BE_ZERO):
        return f"`{shown}: {value}` must be above 0"
    if "fraction" in name and number > 1:
        return f"`{shown}: {value}` is a share, at most 1"
    return ""


# Published dense peaks of accelerators: the denominators of MFU, each with its source.


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one device in TFLOP/s.

    Attributes:
        device: the exact variant.
        pattern: regular expression that the whole name, as the driver reports it, must match.
        tflops: compute dtype -> dense peak; a dtype that is missing is unknown.
        source: where the figures are published.
    """

    device: str
    pattern: str
    tflops: dict[str, float]
    source: str


_HOPPER_SXM = {
    "bfloat16": 989.5,
    "float16": 989.5,
    "tf32": 494.7,
    "float32": 67.0,
    "float8": 1979.0,
}
_AMPERE = {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5}

PEAKS = (
    Peak("H200", r"NVIDIA H200( SXM5?.*)?", _HOPPER_SXM,
         "NVIDIA H200 datasheet (SXM); the sheet's sparse figures halved"),
    Peak("H100 SXM", r"NVIDIA H100( 80GB HBM3| SXM5?.*| 96GB HBM3)", _HOPPER_SXM,
         "NVIDIA H100 datasheet (SXM); the sheet's sparse figures halved"),
    Peak("H100 PCIe", r"NVIDIA H100 PCIe",
         {"bfloat16": 756.5, "float16": 756.5, "tf32": 378.0, "float32": 51.0, "float8": 1513.0},
         "NVIDIA H100 datasheet (PCIe); the sheet's sparse figures halved"),
    Peak("GH200", r"NVIDIA GH200( \d+GB)?", _HOPPER_SXM,
         "NVIDIA GH200 datasheet (its H100 die); the sheet's sparse figures halved"),
    Peak("H800 SXM", r"NVIDIA H800( SXM5?.*)?", _HOPPER_SXM,
         "compute as H100 SXM; only links differ"),
    Peak("B200", r"NVIDIA B200( SXM6?.*)?",
         {"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1125.0, "float32": 80.0, "float8": 4500.0},
         "dense figures collected in github.com/stas00/ml-engineering, compute/accelerator"),
    Peak("GB200", r"NVIDIA GB200( NVL\d+)?",
         {"bfloat16": 2500.0, "float16": 2500.0, "tf32": 1250.0, "float32": 80.0, "float8": 5000.0},
         "dense figures per GPU collected in github.com/stas00/ml-engineering, compute/accelerator"),
    Peak("A100 SXM", r"(NVIDIA )?A100-SXM4-(40|80)GB", _AMPERE, "NVIDIA A100 datasheet, dense"),
    Peak("A100 PCIe", r"(NVIDIA )?A100(-PCIE-(40|80)GB| 80GB PCIe)", _AMPERE,
         "NVIDIA A100 datasheet, dense: peaks of PCIe and SXM are the same, sustained clocks are not"),
    Peak("A800", r"(NVIDIA )?A800(-SXM4-(40|80)GB|-PCIE-(40|80)GB| 80GB PCIe)", _AMPERE,
         "compute as A100; only NVLink differs; USP (arXiv:2405.07719) uses 312 as well"),
    Peak("V100 SXM", r"(NVIDIA |Tesla )?V100-SXM2-(16|32)GB.*", {"float16": 125.0, "float32": 15.7},
         "NVIDIA V100 datasheet (SXM2)"),
    Peak("V100 PCIe", r"(NVIDIA |Tesla )?V100-PCIE-(16|32)GB", {"float16": 112.0, "float32": 14.0},
         "NVIDIA V100 datasheet (PCIe)"),
    Peak("L40S", r"NVIDIA L40S",
         {"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6, "float8": 733.0},
         "NVIDIA L40S datasheet, dense"),
    Peak("RTX 3090", r"NVIDIA GeForce RTX 3090",
         {"bfloat16": 71.2, "float16": 71.2, "tf32": 35.6, "float32": 35.6},
         "NVIDIA GA102 architecture whitepaper, dense, float32 accumulation"),
    Peak("RTX 4090", r"NVIDIA GeForce RTX 4090",
         {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6, "float8": 330.3},
         "NVIDIA Ada architecture whitepaper, dense, float32 accumulation"),
    Peak("MI250X (one of its two dies)", r"AMD Instinct MI250X( OAM)?",
         {"bfloat16": 191.5, "float16": 191.5, "float32": 23.95},
         "AMD Instinct MI250X datasheet, halved: each die is a device of its own"),
    Peak("MI300X", r"AMD Instinct MI300X( OAM)?",
         {"bfloat16": 1300.0, "float16": 1300.0, "tf32": 653.7, "float32": 163.4, "float8": 2610.0},
         "dense figures collected in github.com/stas00/ml-engineering, compute/accelerator"),
)  # fmt: skip

NO_PEAK = (
    (r".* MIG .*", "is a MIG slice: no peak of its own is published, and the full chip's is not its own"),
    (r"NVIDIA H100 NVL", "has published peaks that contradict one another (per card or per pair)"),
)  # fmt: skip
"""(pattern, reason): devices that have no peak here for a reason of their own."""


def published_peak(device_name: str, dtype: str) -> tuple[float | None, str]:
    """Return (dense peak in TFLOP/s, source), or (None, why there is none).

    A name must match as a whole: another variant of a known chip (another form factor, a slice, a
    reduced model) has other peaks.

    Args:
        device_name: as the driver reports it.
        dtype: dtype of the matrix products: `float32`, `tf32`, `bfloat16`, `float16`, `float8`.
    """
    for pattern, reason in NO_PEAK:
        if re.fullmatch(pattern, device_name, re.IGNORECASE):
            return None, f"`{device_name}` {reason}"
    for peak in PEAKS:
        if re.fullmatch(peak.pattern, device_name.strip(), re.IGNORECASE):
            if dtype in peak.tflops:
                return peak.tflops[dtype], peak.source
            return None, f"no published dense peak of {peak.device} in {dtype} is known here"
    return None, f"`{device_name}` is not in the table of published peaks"


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
