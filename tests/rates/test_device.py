"""What a processor is called, and which formats it computes."""

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from vitsweep.rates import profile
from vitsweep.rates.profile import (
    HALF_PRECISION,
    cpu_half_precision,
    cpu_model,
    device_name,
    processor,
)

XEON = "model name\t: Xeon\nflags\t\t: sse4_1 avx avx2 avx512bw avx512_vnni avx512_bf16 amx_bf16\n"


INTEL = (
    "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n" + XEON + "stepping\t: 8\n\n"
    "vendor_id\t: Other\nmodel\t\t: 1\nmodel name\t: Other\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setattr(profile, "CPUINFO", tmp_path / "cpuinfo")
    return lambda text: (tmp_path / "cpuinfo").write_text(text) and None


def test_a_processor_has_its_name_its_numbers_and_its_formats(
    cpuinfo: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    for text, name, numbers, formats in (
        (INTEL, "Xeon", "GenuineIntel-6-143-8", "amx_bf16, avx512_bf16"),
        (XEON, "Xeon", "Xeon", "amx_bf16, avx512_bf16"),
        (ARM, "riscv64", "0x41-0xd40", "bf16"),
        ("flags\t: sse2 avx\n", "riscv64", "riscv64", "none"),
    ):
        cpuinfo(text)
        assert device_name("cpu") == cpu_model() == name
        assert processor.__wrapped__() == numbers
        assert cpu_half_precision() == formats
    monkeypatch.setattr(platform, "processor", lambda: "Power10")
    assert cpu_model() == "Power10"


def test_the_instructions_of_this_processor_are_known_ones() -> None:
    found = cpu_half_precision()
    assert found == "none" or set(found.split(", ")) <= set(HALF_PRECISION)
