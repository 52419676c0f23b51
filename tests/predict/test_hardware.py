"""Profiles of devices: every figure has a source, unknown ones say what to do."""

from pathlib import Path

import pytest

from vitsweep.errors import BadValueError
from vitsweep.measure.hardware import PEAKS
from vitsweep.predict.hardware import (
    PROFILES,
    Hardware,
    generic_gpu,
    hardware_named,
    hardware_of_device,
    known_hardware,
    most_usable_bytes,
)


@pytest.mark.parametrize("name", known_hardware())
def test_every_figure_of_a_profile_has_a_source_and_says_how_sure_it_is(name: str) -> None:
    hardware = hardware_named(name)
    assert all(figure.source and figure.confidence for figure in hardware.figures.values())
    assert hardware.figures.keys() >= generic_gpu().figures.keys()
    assert 0 < hardware.usable_bytes < hardware["memory_gib"] * 2**30


def test_peaks_are_those_of_the_table_for_mfu() -> None:
    [h100] = [peak for peak in PEAKS if peak.device == "H100 SXM"]
    assert hardware_named("h100").peak_tflops == h100.tflops


def test_devices_without_a_sourced_rate_of_products_are_known_as_such() -> None:
    sourced = {name for name in known_hardware() if hardware_named(name).has_sourced_matmul_rate}
    assert sourced == {"a100_40g", "a100_80g", "h100", "h200", "b200", "mi300x"}


def test_the_name_that_a_driver_reports_finds_the_variant_by_its_memory() -> None:
    found = hardware_of_device("NVIDIA A100-SXM4-80GB", memory_gib=79.2)
    assert isinstance(found, Hardware)
    assert found.name == "a100_80g"
    assert hardware_of_device("NVIDIA A100-SXM4-80GB") == found
    assert hardware_of_device("NVIDIA GeForce GTX 970") is None


@pytest.mark.parametrize(
    ("slurm_type", "profile", "times"),
    [
        ("nvidia_a100-sxm4-80gb", "a100_80g", 1.0),
        ("nvidia_a100-sxm4-40gb", "a100_40g", 1.0),
        ("a100", "a100_80g", 1.2),
        ("H100", "h100", 1.2),
        ("v100", "v100", 1.2),
    ],
)
def test_a_type_of_slurm_is_the_largest_device_that_it_may_mean(
    slurm_type: str, profile: str, times: float
) -> None:
    assert most_usable_bytes(slurm_type) == times * hardware_named(profile).usable_bytes


def test_types_of_gpus_that_nobody_knows_have_no_size() -> None:
    assert most_usable_bytes("gtx970") is None
    assert most_usable_bytes("") is None


def test_unknown_hardware_lists_the_known_and_explains_a_file() -> None:
    with pytest.raises(BadValueError, match=r"h100.*Did you mean `--hardware h200`.*profile file"):
        hardware_named("h20")


def test_a_file_of_ones_own_takes_what_it_leaves_out_from_the_generic_profile(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    text = (PROFILES / "h100.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("value: 3.35", "value: 2.4"), encoding="utf-8")
    mine = hardware_named(str(path))
    assert (mine["memory_tb_s"], mine.name) == (2.4, "mine")
    assert mine["dispatch_us"] == generic_gpu()["dispatch_us"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_tflops: {bfloat16: 100}", "lacks memory_gib, memory_tb_s"),
        ("figures: {memory_gib: 80}", "`memory_gib` needs `value`, `source` and `confidence`"),
        ("peaks_of: H1000", "`peaks_of: H1000` is none of"),
        ("- a list", "is no hardware profile"),
        ("a: [", "is no hardware profile"),
        (
            "figures: {memory_gib: {value: 80, source: me, confidence: sure}}",
            "`memory_gib.confidence: sure` is none of measured, published",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadValueError) as refused:
        hardware_named(str(path))
    assert str(path) in str(refused.value)
    assert said in str(refused.value)
    with pytest.raises(BadValueError, match="there is no file"):
        hardware_named(str(tmp_path / "none.yaml"))
