"""Published dense peaks of accelerators: the denominators of MFU, each with its source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one device in TFLOP/s, by compute dtype; a dtype that is missing is unknown."""

    device: str
    tflops: dict[str, float]
    source: str


PEAKS = (
    # order matters: the first whose name is part of the device's name
    Peak("H200", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.7, "float32": 67.0, "float8": 1979.0},
         "NVIDIA H200 datasheet (SXM); the sheet's sparse figures halved"),
    Peak("H100 PCIe", {"bfloat16": 756.5, "float16": 756.5, "tf32": 378.0, "float32": 51.0, "float8": 1513.0},
         "NVIDIA H100 datasheet (PCIe); the sheet's sparse figures halved"),
    Peak("H100", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.7, "float32": 67.0, "float8": 1979.0},
         "NVIDIA H100 datasheet (SXM); the sheet's sparse figures halved"),
    Peak("H800", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.7, "float32": 67.0, "float8": 1979.0},
         "compute as H100 SXM; only links differ"),
    Peak("A100", {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5},
         "NVIDIA A100 datasheet, dense"),
    Peak("A800", {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5},
         "compute as A100; only NVLink differs; USP (arXiv:2405.07719) uses 312 as well"),
    Peak("V100", {"float16": 125.0, "float32": 15.7},
         "NVIDIA V100 datasheet (SXM2)"),
    Peak("L40S", {"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6, "float8": 733.0},
         "NVIDIA L40S datasheet, dense"),
)  # fmt: skip


def published_peak(device_name: str, dtype: str) -> tuple[float | None, str]:
    """Return (dense peak in TFLOP/s, source), or (None, why there is none).

    Args:
        device_name: as the driver reports it.
        dtype: dtype of the matrix products: `float32`, `tf32`, `bfloat16`, `float16`, `float8`.
    """
    for peak in PEAKS:
        if peak.device.lower() in device_name.lower():
            if dtype in peak.tflops:
                return peak.tflops[dtype], peak.source
            return None, f"no published dense peak of {peak.device} in {dtype} is known here"
    return None, f"`{device_name}` is not in the table of published peaks"
