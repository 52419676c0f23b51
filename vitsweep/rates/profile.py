"""Devices by their profiles: published peaks, rates and network, each figure with its source (no torch).

A profile is a YAML file (`profiles/*.yaml`, or one of your own):

    name: my GPU
    peaks_of: a100_80g    # of another profile, or peak_tflops: {float32: 19.5, bfloat16: 312}
    figures:              # scalars, or tables {where: value} that are read between their points
      memory_gib: {value: 80, source: data sheet, confidence: published}
      memory_tb_s: {value: 2.0, source: data sheet, confidence: published}

`confidence` is `measured` (a benchmark of that device), `published` (a data sheet), `derived` (computed
from others, or taken from a similar device) or `assumed`. What a file leaves out is taken from
`profiles/generic_gpu.yaml`. Profiles without `memory_gib` are no choice of `--hardware`: of these devices
only the denominators of MFU and roofline are known.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from vitsweep.errors import BadValueError
from vitsweep.foreign import MOST_YAML_BYTES, parsed_yaml
from vitsweep.spec.from_yaml import sentence
from vitsweep.words import did_you_mean

PROFILES = Path(__file__).parent / "profiles"
GENERIC = "generic_gpu"
OWN = ("memory_gib", "memory_tb_s")
"""Figures that no profile takes from the generic one."""


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("bool", "must be a number")
    return value


Confidence = Literal["measured", "published", "derived", "assumed"]
Format = Literal["float32", "tf32", "bfloat16", "float16", "float8"]
Number = Annotated[float, BeforeValidator(_no_truth_value), Field(allow_inf_nan=False)]
AtLeastZero = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Positive, Field(le=1)]
Whole = Annotated[Positive, Field(multiple_of=1)]
Table = Annotated[dict[Positive, Positive], Field(min_length=1)]
Shares = Annotated[dict[Positive, Share], Field(min_length=1)]
Value = TypeVar("Value")


class Checked(BaseModel):
    """A part of a profile, checked when it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(Checked, Generic[Value]):
    """One number, or one table {position: number}, with its source and how sure it is."""

    value: Value
    source: Annotated[str, Field(min_length=1)]
    confidence: Confidence


class Figures(Checked):
    """What is known of a device, its node and its network; the units are in the names."""

    memory_gib: Figure[Positive] | None = None
    memory_tb_s: Figure[Positive] | None = None
    multiprocessors: Figure[Whole]
    reserved_gib: Figure[AtLeastZero]
    devices_per_node: Figure[Whole]
    matmul_fraction: Figure[Annotated[dict[Format, Share], Field(min_length=1)]]
    sustained_fraction: Figure[Share]
    memory_fraction: Figure[Shares]
    attention_fraction_d64: Figure[Shares]
    attention_fraction_d128: Figure[Shares]
    kernel_us: Figure[AtLeastZero]
    dispatch_us: Figure[AtLeastZero]
    compiled_dispatch_fraction: Figure[Share]
    compiled_memory_fraction: Figure[Share]
    link_gb_s: Figure[Positive]
    nic_gb_s: Figure[Positive]
    all_reduce_gb_s: Figure[Table]
    gather_over_reduce: Figure[Positive]
    fabric_fraction: Figure[Share]
    fabric_pass_us: Figure[AtLeastZero]
    overlap_charge_link: Figure[AtLeastZero]
    overlap_charge_fabric: Figure[AtLeastZero]


class Profile(Checked):
    """One device, its node and its network.

    Attributes:
        name: as typed after `--hardware`: of the file.
        title: its full name.
        drivers_name: regular expression of the whole name that the driver reports; "" if unknown.
        peak_tflops: dtype of the products -> dense peak; a dtype that is missing is unknown.
        peak_source: where these are published.
        no_peak: why there are none.
        figures: all others.
    """

    name: str
    title: str
    drivers_name: str = ""
    peak_tflops: dict[Format, Positive] = {}
    peak_source: str = ""
    no_peak: str = "is not in the table of published peaks"
    figures: Figures

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.peak_tflops and "float32" not in self.peak_tflops:
            raise ValueError(
                "`peak_tflops` lacks `float32`, from which the rate of any other format is no estimate"
            )
        if self.figures.memory_gib and self["memory_gib"] <= self["reserved_gib"]:
            raise ValueError("`reserved_gib` leaves nothing of `memory_gib`")
        return self

    def __getitem__(self, figure: str) -> float:
        """Return a scalar figure."""
        return float(getattr(self.figures, figure).value)

    @property
    def lacking(self) -> list[str]:
        """What `--hardware` needs of a device itself, as far as the profile lacks it."""
        lacking = [name for name in OWN if getattr(self.figures, name) is None]
        return [*lacking, *["peaks_of or peak_tflops"] * (not self.peak_tflops)]

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors may take: without the driver's context and the buffers of NCCL."""
        return (self["memory_gib"] - self["reserved_gib"]) * 2**30

    @property
    def has_tf32(self) -> bool | None:
        """Whether the device multiplies float32 as TF32; None where its driver decides (AMD)."""
        return "tf32" in self.peak_tflops and (not self.title.startswith("AMD ") or None)


def profile_names() -> list[str]:
    """Return the names that `--hardware` takes."""
    return [name for name, profile in _profiles().items() if not profile.lacking]


def profile_named(name: str) -> Profile:
    """Return a device by its name, or read the profile file at a path.

    Raises:
        BadValueError: there is no such device and no such file, or the file is no profile.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BadValueError(f"`--hardware {name}`: there is no file `{path.absolute()}`.")
        found = _read(path)
        if found.lacking:
            lacking = ", ".join(found.lacking)
            raise BadValueError(f"`{path}` lacks {lacking}: no other device has the same.")
        return found
    known = profile_names()
    if name.lower() not in known:
        raise BadValueError(
            f"`--hardware {name}`: unknown device"
            + did_you_mean(
                name,
                known,
                lambda device: f"--hardware {device}",
                f"known are {', '.join(known)}, and for another one a copy of a file of {PROFILES} with "
                "figures of your own (`--hardware my_gpu.yaml`)",
            )
        )
    return _profiles()[name.lower()]


@cache
def generic_gpu() -> Profile:
    """Return a GPU of which nothing is known: an A100's peaks, with intervals of assumed figures."""
    return _read(PROFILES / f"{GENERIC}.yaml")


def profile_of(device: str, complete: bool = False) -> Profile | None:
    """Return the profile of a device by the name that its driver reports; None if there is none.

    A name must match as a whole: another variant of a known chip (another form factor, a reduced model)
    has other figures, and so has a MIG slice.

    Args:
        device: such as `NVIDIA H100 80GB HBM3`.
        complete: whether the profile must be one that `--hardware` takes.
    """
    name = device.strip()
    found = (
        profile
        for profile in _profiles().values()
        if profile.drivers_name and re.fullmatch(profile.drivers_name, name, re.IGNORECASE)
    )
    first = None if " MIG " in name else next(found, None)
    return None if complete and first and first.lacking else first


def published_peak(device: str, dtype: str) -> tuple[float | None, str]:
    """Return (dense peak in TFLOP/s, source), or (None, why there is none).

    Args:
        device: name as the driver reports it.
        dtype: dtype of the matrix products: `float32`, `tf32`, `bfloat16`, `float16`, `float8`.
    """
    profile = profile_of(device)
    peaks: Mapping[Any, float] = profile.peak_tflops if profile else {}
    if profile and dtype in peaks:
        return peaks[dtype], profile.peak_source
    if profile and peaks:
        return None, f"no published dense peak of {profile.title} in {dtype} is known here"
    why = profile.no_peak if profile else Profile.model_fields["no_peak"].default
    return None, f"`{device}` {why}"


LARGER_VARIANTS = 1.2
"""Memory of the largest variant that a short name may stand for, over that of the profile: there are H100s
of 80, 94 and 96 GB."""


def most_usable_bytes(gpu_type: str) -> float | None:
    """Return the memory that tensors may take on the largest GPU of that type; None if it is unknown.

    Args:
        gpu_type: as Slurm names it: `a100`, or the driver's name as its autodetection writes it,
            `nvidia_a100-sxm4-80gb`.
    """
    matching = profiles_of_type(gpu_type)
    times = 1.0 if _exactly(gpu_type) else LARGER_VARIANTS
    return times * max(p.usable_bytes for p in matching) if matching else None


def profiles_of_type(gpu_type: str) -> list[Profile]:
    """Return the devices that Slurm may mean by a type of GPU; none if it is unknown."""
    if exact := _exactly(gpu_type):
        return [exact]
    text = gpu_type.lower()
    names = [name for name in profile_names() if text and f"{name}_".startswith(f"{text}_")]
    return [profile_named(name) for name in names]


def _exactly(gpu_type: str) -> Profile | None:
    return profile_of(gpu_type.lower().replace("_", " "), complete=True)


@cache
def _profiles() -> dict[str, Profile]:
    return {p.stem: _read(p) for p in sorted(PROFILES.glob("*.yaml")) if p.stem != GENERIC}


@cache
def _tree(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            tree = parsed_yaml(file.read(MOST_YAML_BYTES + 1))
    except ValueError as error:
        raise _no_profile(path, str(error)) from error
    if not isinstance(tree, dict):
        raise _no_profile(path, f"it holds {str(tree)[:40]!r} instead of keys with values")
    return tree


def _read(path: Path) -> Profile:
    tree = {"name": path.stem, **_tree(path)}
    own = tree.get("figures") or {}
    generic = _tree(PROFILES / f"{GENERIC}.yaml")["figures"]
    inherited = {key: node for key, node in generic.items() if key not in OWN}
    tree["figures"] = inherited | own if isinstance(own, dict) else own
    if like := tree.pop("peaks_of", None):
        known = [other.stem for other in sorted(PROFILES.glob("*.yaml"))]
        if like not in known:
            raise _no_profile(path, f"`peaks_of: {like}` is none of {', '.join(known)}")
        other = _tree(PROFILES / f"{like}.yaml")
        tree |= {key: other[key] for key in ("peak_tflops", "peak_source")}
    try:
        return Profile.model_validate({**tree, "name": path.stem, "title": str(tree["name"])})
    except ValidationError as error:
        raise _no_profile(path, "; ".join(_faults(error))) from error


def _faults(error: ValidationError) -> Iterator[str]:
    """Yield what is wrong with a profile, as parts of a sentence."""
    for problem in error.errors():
        place = [str(part) for part in problem["loc"] if part != "[key]"]
        match problem["type"]:
            case "extra_forbidden":
                known = Figures.model_fields if place[0] == "figures" else Profile.model_fields
                hint = did_you_mean(place[-1], list(known), str).rstrip(".")
                yield f"`{'.'.join(place)}` is nothing that a profile has{hint}"
            case "model_type":
                yield f"`{'.'.join(place)}` needs `value`, `source` and `confidence`"
            case "value_error":
                yield str(problem["ctx"]["error"])
            case "missing":
                yield f"`{'.'.join(place)}` is missing"
            case _:
                yield f"`{'.'.join(place)}: {problem['input']}`: {sentence(problem)}"


def _no_profile(path: Path, faults: str) -> BadValueError:
    return BadValueError(
        f"`{path}` is no hardware profile: {faults}. It needs `name`, `peaks_of` or "
        "`peak_tflops`, and `figures` with `value`, `source` and `confidence` each: see "
        f"{PROFILES / 'h100.yaml'}, and {PROFILES / GENERIC}.yaml for all figures."
    )


# Names of this machine's processor and accelerator, without loading torch.

CPUINFO = Path("/proc/cpuinfo")
HALF_PRECISION = ("amx_bf16", "avx512_bf16", "amx_fp16", "avx512_fp16", "bf16")
"""Flags of /proc/cpuinfo; the last one is ARM's."""


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    found = re.search(r"model name\s*:\s*(.+)", CPUINFO.read_text(encoding="utf-8"))
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def processor() -> str:
    """Return the numbers of the first processor's vendor, family, model and stepping."""
    facts = dict(
        re.findall(
            r"^([^:\t]+)\t*: *(.*)", CPUINFO.read_text(encoding="utf-8").split("\n\n")[0], re.M
        )
    )
    wanted = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    return "-".join(facts[name] for name in wanted if name in facts) or cpu_model()


def cpu_half_precision() -> str:
    """Return the instructions for bfloat16 and float16, `none` where there are none."""
    text = CPUINFO.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.M)
    flags = {flag for line in lines for flag in line.split()}
    return ", ".join(name for name in HALF_PRECISION if name in flags) or "none"


def device_name(device: str) -> str | None:
    """Return the device's name as in the `device` column of records; None without a driver.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return cpu_model()
    name = _of_first_gpu(lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu))
    return name.decode() if isinstance(name, bytes) else name


def free_gpu_gib() -> float | None:
    """Return the free memory of the first GPU that this process may use; None without a driver."""
    return _of_first_gpu(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**30)


def _of_first_gpu(ask: Callable[[Any, Any], Any]) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml

        pynvml.nvmlInit()
        return ask(
            pynvml,
            pynvml.nvmlDeviceGetHandleByUUID(visible)
            if visible.startswith(("GPU-", "MIG-"))
            else pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0)),
        )
    except Exception:  # no driver, no library, no permission
        return None
