"""A processor without some of its instructions is another device."""

from pathlib import Path

import pytest

from vitsweep.rates import profile
from vitsweep.rates.profile import HALF_PRECISION, cpu_half_precision, cpu_model, device_name

XEON = "model name\t: Xeon\nflags\t\t: sse4_1 avx avx2 avx512bw avx512_vnni avx512_bf16 amx_bf16\n"


@pytest.fixture
def xeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "cpuinfo").write_text(XEON)
    monkeypatch.setattr(profile, "CPUINFO", tmp_path / "cpuinfo")
    for variable in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_a_processor_with_all_its_instructions_has_its_plain_name(
    xeon: pytest.MonkeyPatch,
) -> None:
    assert device_name("cpu") == cpu_model() == "Xeon"
    assert cpu_half_precision() == "amx_bf16, avx512_bf16"


@pytest.mark.parametrize("value", ["", "ALL", "DEFAULT", "AVX512_CORE_AMX", "avx512_core_amx_fp16"])
def test_a_limit_that_takes_nothing_away_is_none(xeon: pytest.MonkeyPatch, value: str) -> None:
    xeon.setenv("ONEDNN_MAX_CPU_ISA", value)
    xeon.setenv("ATEN_CPU_CAPABILITY", "avx512")
    assert device_name("cpu") == "Xeon"


@pytest.mark.parametrize(
    ("limit", "shown", "half_precision"),
    [
        ("AVX512_CORE_BF16", "AVX512_CORE_BF16", "avx512_bf16"),
        ("AVX512_CORE_VNNI", "AVX512_CORE_VNNI", "none"),
        ("AVX2_VNNI_2", "AVX2", "none"),
        ("avx2", "AVX2", "none"),
    ],
)
def test_the_environment_makes_it_another_device(
    xeon: pytest.MonkeyPatch, limit: str, shown: str, half_precision: str
) -> None:
    xeon.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert device_name("cpu") == f"Xeon, limited to {shown} (oneDNN)"
    assert cpu_half_precision() == half_precision


def test_both_libraries_are_named(xeon: pytest.MonkeyPatch) -> None:
    xeon.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    xeon.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert device_name("cpu") == "Xeon, limited to AVX2 (oneDNN) and avx2 (ATen)"


def test_the_instructions_of_this_processor_are_known_ones() -> None:
    found = cpu_half_precision()
    assert found == "none" or set(found.split(", ")) <= set(HALF_PRECISION)
