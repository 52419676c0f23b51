"""What a processor is called, and which formats it computes."""

from pathlib import Path

import pytest

from vitsweep.rates import profile
from vitsweep.rates.profile import HALF_PRECISION, cpu_half_precision, cpu_model, device_name

XEON = "model name\t: Xeon\nflags\t\t: sse4_1 avx avx2 avx512bw avx512_vnni avx512_bf16 amx_bf16\n"


@pytest.fixture
def xeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "cpuinfo").write_text(XEON)
    monkeypatch.setattr(profile, "CPUINFO", tmp_path / "cpuinfo")
    return monkeypatch


def test_a_processor_has_its_name_and_its_formats(
    xeon: pytest.MonkeyPatch,
) -> None:
    assert device_name("cpu") == cpu_model() == "Xeon"
    assert cpu_half_precision() == "amx_bf16, avx512_bf16"


def test_the_instructions_of_this_processor_are_known_ones() -> None:
    found = cpu_half_precision()
    assert found == "none" or set(found.split(", ")) <= set(HALF_PRECISION)
