"""Published dense peaks of accelerators: the denominators of MFU, each with its source."""

import re
from dataclasses import dataclass


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
