"""Profiles of devices: every figure has a source, unknown ones say what to do."""

from pathlib import Path

import pytest

from vitsweep.errors import BadValueError
from vitsweep.rates.profile import (
    PROFILES,
    Profile,
    generic_gpu,
    most_usable_bytes,
    profile_named,
    profile_names,
    profile_of,
    profiles_of_type,
    published_peak,
)


def test_every_figure_of_a_profile_has_a_source_and_says_how_sure_it_is() -> None:
    for name in profile_names():
        hardware = profile_named(name)
        assert all(figure.source and figure.confidence for _, figure in hardware.figures if figure)
        assert hardware.figures.model_fields_set >= generic_gpu().figures.model_fields_set
        assert 0 < hardware.usable_bytes < hardware["memory_gib"] * 2**30


def test_the_figures_of_a_device_are_those_of_its_file() -> None:
    h100, v100, generic = profile_named("H100"), profile_named("v100"), generic_gpu()
    assert h100.usable_bytes == (80 - 3.3) * 2**30
    assert (h100.has_tf32, v100.has_tf32) == (True, False)
    assert (h100["dispatch_us"], v100["link_gb_s"], generic["memory_gib"]) == (10, 150, 40)
    assert (h100.title, h100.name) == ("NVIDIA H100 SXM, 80 GB", "h100")
    assert generic.peak_tflops == profile_named("a100_80g").peak_tflops
    assert "generic_gpu" not in profile_names()


def test_a_published_peak_has_its_source_and_an_unknown_one_a_reason_of_its_own() -> None:
    h100 = profile_named("h100")
    for dtype, peak in h100.peak_tflops.items():
        assert published_peak("NVIDIA H100 80GB HBM3", dtype) == (peak, h100.peak_source)
    other = published_peak("NVIDIA H100 80GB HBM3", "float4")
    without, unknown = (published_peak(d, "float32") for d in ("NVIDIA H100 NVL", "NVIDIA GTX 970"))
    assert [peak for peak, _ in (other, without, unknown)] == [None] * 3
    assert h100.title in other[1]
    nvl, default = profile_of("NVIDIA H100 NVL"), Profile.model_fields["no_peak"].default
    assert nvl
    assert nvl.no_peak != default
    assert without[1].endswith(nvl.no_peak)
    assert unknown[1].endswith(default)


def is_sourced(profile: Profile) -> bool:
    return profile.figures.matmul_fraction.confidence == "measured"


def test_devices_without_a_sourced_rate_of_products_are_known_as_such() -> None:
    sourced = {name for name in profile_names() if is_sourced(profile_named(name))}
    assert sourced == {"a100_40g", "a100_80g", "h100", "h200", "b200", "mi300x"}


def test_the_whole_name_that_a_driver_reports_finds_the_variant() -> None:
    for device, name in (
        ("NVIDIA A100-SXM4-80GB", "a100_80g"),
        (" nvidia a100-sxm4-40gb ", "a100_40g"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""),
        ("an NVIDIA A100-SXM4-80GB", ""),
        ("NVIDIA GeForce GTX 970", ""),
        ("", ""),
    ):
        found, complete = profile_of(device), profile_of(device, complete=True)
        assert (found.name if found else "") == (complete.name if complete else "") == name


def test_devices_of_which_only_denominators_are_known_are_no_choice_of_hardware() -> None:
    nvl = profile_of("NVIDIA H100 NVL")
    assert nvl is not None
    assert nvl.lacking == ["memory_gib", "peaks_of or peak_tflops"]
    assert profile_named("h100").lacking == []
    assert profile_of("NVIDIA H100 NVL", complete=True) is None
    assert "h100_nvl" not in profile_names()


def test_a_type_of_slurm_is_the_largest_device_that_it_may_mean() -> None:
    for slurm_type, names, times in (
        ("nvidia_a100-sxm4-80gb", {"a100_80g"}, 1.0),
        ("nvidia_a100-sxm4-40gb", {"a100_40g"}, 1.0),
        ("a100", {"a100_40g", "a100_80g"}, 1.2),
        ("H100", {"h100"}, 1.2),
        ("nvidia_h100_nvl", set(), None),
        ("v100", {"v100", "v100_16g"}, 1.2),
        ("v10", set(), None),
        ("gtx970", set(), None),
        ("", set(), None),
    ):
        assert {profile.name for profile in profiles_of_type(slurm_type)} == names, slurm_type
        largest = max((profile_named(name).usable_bytes for name in names), default=None)
        assert most_usable_bytes(slurm_type) == (times and largest and times * largest)


def test_unknown_hardware_lists_the_known_and_explains_a_file() -> None:
    with pytest.raises(BadValueError, match="`--hardware rtx_4090`"):
        profile_named("rtx_4091")
    with pytest.raises(BadValueError, match=r"`--hardware x1`.*h100"):
        profile_named("x1")


def test_a_file_of_ones_own_takes_what_it_leaves_out_from_the_generic_profile(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    text = (PROFILES / "h100.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("value: 3.35", "value: 2.4"), encoding="utf-8")
    mine = profile_named(str(path))
    assert (mine["memory_tb_s"], mine.name) == (2.4, "mine")
    assert mine["dispatch_us"] == generic_gpu()["dispatch_us"]
    path.rename(other := tmp_path / "other.yml")
    assert profile_named(str(other)).name == "other"


def test_a_file_has_its_peaks_of_its_own_or_of_another_profile(tmp_path: Path) -> None:
    memory = (
        "memory_gib: {value: 4, source: me, confidence: assumed}, "
        "memory_tb_s: {value: 1, source: me, confidence: assumed}"
    )
    for peaks, float32 in (("peaks_of: v100", 15.7), ("peak_tflops: {float32: 2}", 2)):
        (path := tmp_path / f"{float32}.yaml").write_text(f"{{{peaks}, figures: {{{memory}}}}}")
        found = profile_named(str(path))
        assert found.peak_tflops["float32"] == float32
        assert found.peak_source == (profile_named("v100").peak_source if float32 > 2 else "")
    path = tmp_path / "bare.yaml"
    path.write_text("peak_tflops: {float32: 2}")
    with pytest.raises(BadValueError, match="memory_gib, memory_tb_s"):
        profile_named(str(path))


def test_a_file_may_have_a_mebibyte(tmp_path: Path) -> None:
    text = (PROFILES / "h100.yaml").read_bytes() + b"\n#"
    for more, refused in ((0, False), (1, True)):
        (path := tmp_path / f"p{more}.yaml").write_bytes(text.ljust(2**20 + more))
        if refused:
            with pytest.raises(BadValueError):
                profile_named(str(path))
        else:
            assert profile_named(str(path)).name == "p0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_tflops: {float32: 10}", "lacks memory_gib, memory_tb_s"),
        (
            "figures: {memory_gib: 80}",
            "`figures.memory_gib` needs `value`, `source` and `confidence`",
        ),
        ("peaks_of: H1000", "`peaks_of: H1000` is none of"),
        ("- a list", "`name`"),
        ("figures: 5", "`figures"),
        ("figures: {kernel_us: {value: true, %s}}", "kernel_us.value: True`: must be a number"),
        ("figures: {memory_fraction: {value: {1: 2}, %s}}", "`figures.memory_fraction.value.1: 2`"),
        ("drivers_nam: x", "did you mean `drivers_name`?"),
        ("a: [", "`name`"),
        (
            "figures: {memory_gib: {value: 80, source: me, confidence: sure}}",
            "`figures.memory_gib.confidence: sure`",
        ),
        (
            "figures: {memory_gib: {value: {1: 80}, %s}}",
            "`figures.memory_gib.value: {1: 80}`",
        ),
        (
            "figures: {matmul_fraction: {value: 0.8, %s}}",
            ".value: 0.8`",
        ),
        (
            "figures: {matmul_fraction: {value: {half: 0.8}, %s}}",
            "`figures.matmul_fraction.value.half: half`: must be `float32`",
        ),
        (
            "figures: {all_reduce_gb_s: {value: {}, %s}}",
            "gb_s.value: {}`: Dictionary should",
        ),
        (
            "figures: {memory_tb_s: {value: 0, %s}}",
            "memory_tb_s.value: 0`",
        ),
        (
            "figures: {memory_tb_s: {value: -2.0, %s}}",
            ".value: -2.0`",
        ),
        (
            "figures: {memory_tb_s: {value: fast, %s}}",
            ".value: fast`",
        ),
        (
            "figures: {sustained_fraction: {value: 90, %s}}",
            ".value: 90`",
        ),
        (
            "figures: {devices_per_node: {value: 1.5, %s}}",
            ".value: 1.5`",
        ),
        ("figures: {memoryy_tb_s: {value: 5, %s}}", "did you mean `memory_tb_s`?"),
        ("peak_tflops: {bfloat16: 312}", "`peak_tflops` lacks `float32`"),
        ("peak_tflops: {half: 312}", "`peak_tflops.half: half`: must be `float32`"),
        ("peaks: A100 SXM", "`peaks`"),
        (
            "{peaks_of: a100_80g, figures: {memory_tb_s: {value: 2, %s}, memory_gib: {value: 3.3, %s}}}",
            "`reserved_gib` leaves nothing of `memory_gib`",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("%s", "source: me, confidence: published"), encoding="utf-8")
    with pytest.raises(BadValueError) as refused:
        profile_named(str(path))
    assert str(path) in str(refused.value)
    assert said in str(refused.value)
    with pytest.raises(BadValueError, match=f"`{tmp_path / 'none.yaml'}`"):
        profile_named(str(tmp_path / "none.yaml"))
