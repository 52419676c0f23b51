"""Throughput and utilisation by hand; what is unknown stays empty, with its reason."""

import re

import pytest
import yaml

from tests.cells import GPU_NODE, cell, entry
from vitsweep.measure.utilization import compute_dtype, throughput, utilization
from vitsweep.model.flops import num_parameters, train_flops
from vitsweep.rates.profile import PROFILES, published_peak


def test_a_known_device_has_a_peak_with_its_source() -> None:
    peak, source = published_peak("NVIDIA H200", "bfloat16")
    assert peak == 989.5
    assert source.startswith("NVIDIA H200 datasheet (SXM)")
    assert published_peak("NVIDIA A100-SXM4-80GB", "tf32")[0] == 156.0


def test_every_variant_has_its_own_peak() -> None:
    for name, bfloat16 in [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H800", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1300.0),
    ]:
        assert published_peak(name, "bfloat16")[0] == bfloat16


def test_another_variant_never_has_the_full_chips_peak() -> None:
    for name, reason in [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "not in the table"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "not in the table"),
        ("NVIDIA H100 NVL", "contradict one another"),
        ("NVIDIA H200 NVL", "not in the table"),
        ("NVIDIA H800 PCIe", "not in the table"),
        ("NVIDIA H20-3e", "not in the table"),
        ("NVIDIA A10", "not in the table"),
        ("NVIDIA A100X", "not in the table"),
        ("NVIDIA L40", "not in the table"),
        ("NVIDIA GeForce RTX 4090 D", "not in the table"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "not in the table"),
    ]:
        peak, why = published_peak(name, "float16")
        assert peak is None
        assert name in why
        assert reason in why


def test_an_unknown_device_has_none_and_a_reason() -> None:
    peak, why = published_peak("AMD EPYC 7B13", "float32")
    assert peak is None
    assert why.startswith("`AMD EPYC 7B13` ")


def test_an_unknown_format_has_none_and_a_reason() -> None:
    peak, why = published_peak("Tesla V100-SXM2-16GB", "bfloat16")
    assert peak is None
    assert "NVIDIA V100 SXM2, 16 GB in bfloat16" in why


def test_peaks_fall_with_the_width_of_the_format_and_name_a_source() -> None:
    for name in [path.stem for path in PROFILES.glob("*.yaml")]:
        profile = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
        if "peak_tflops" not in profile:
            assert {"peaks_of", "no_peak"} & set(profile) or name == "h200_nvl"
            continue
        peaks = profile["peak_tflops"]
        assert len(profile["peak_source"]) > 10
        order = [
            peaks[dtype] for dtype in ("float8", "float16", "tf32", "float32") if dtype in peaks
        ]
        assert order == sorted(order, reverse=True)
        assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]


def test_the_peak_is_that_of_the_matrix_products() -> None:
    for overrides, dtype in [
        (["precision=fp32"], "float32"),
        (["precision=fp32", "precision.dtype=float64"], "float64"),
        (["precision=tf32"], "tf32"),
        (["precision=O0"], "float32"),
        (["precision=O1"], "float16"),
        (["precision=O2"], "float16"),
        (["precision=O3"], "float16"),
        (["precision=bf16"], "bfloat16"),
        (["precision=fp8"], "float8"),
    ]:
        assert compute_dtype(cell(*overrides, machine=GPU_NODE)) == dtype


def test_the_peak_of_fp8_is_that_of_what_its_own_products_could_reach() -> None:
    """In a ViT-L `out`, `down`, attention and what lies outside the blocks stay in bfloat16."""
    spec = entry("model=vit_large", "data=synthetic", "precision=fp8", machine=GPU_NODE).spec
    columns, facts = utilization(spec, 500.0, "NVIDIA H100 80GB HBM3")
    tokens, width, depth = 197, 1024, 24
    of_linears = 6 * tokens * depth * width**2 * 7  # qkv 3 and up 4 have more than 1,024 outputs
    share = of_linears / train_flops(spec.model, 224, "token")
    reach = 1 / (share / 1979 + (1 - share) / 989)
    assert columns["mfu"] == pytest.approx(500 / reach, rel=1e-3)
    assert re.search(f" {share:.1%} .*bfloat16", facts["peak_source"])


def test_columns_of_the_speed_follow_from_the_step_time() -> None:
    spec = cell("batch.images_per_step=16")  # two ranks
    found = throughput(spec, 4.0)
    flops = train_flops(spec.model, 8, "token")
    assert found == pytest.approx(
        {
            "images_per_second": 4000.0,
            "images_per_second_per_rank": 2000.0,
            "tokens_per_second": 4000.0 * 17,
            "step_time_ms": 4.0,
            "num_parameters": num_parameters(spec.model, 8, "token"),
            "model_flops_per_image": flops,
            "model_tflops_per_rank": flops * 2000.0 / 1e12,
            "epoch_hours_imagenet1k": 1281167 / 4000.0 / 3600,
        }
    )


def test_utilisation_divides_by_the_published_peak() -> None:
    spec = cell("precision=O1", "attention=sdpa_math", machine=GPU_NODE)
    columns, source = utilization(spec, 494.75, "NVIDIA H200")
    assert columns == pytest.approx({"mfu": 0.5})
    assert source["peak_tflops"] == pytest.approx(989.5)
    assert source["compute_dtype"] == "float16"
    assert "H200 datasheet" in source["peak_source"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=sdpa_causal", "classifier=pooled"],
        ["attention=linear"],
    ],
)
def test_what_attends_to_less_has_fewer_flops(overrides: list[str]) -> None:
    large = ("batch.resolution_px=32", "classifier=pooled")
    plain = throughput(cell(*large), 1.0)["model_flops_per_image"]
    assert throughput(cell(*large, *overrides), 1.0)["model_flops_per_image"] < 0.7 * plain


def test_unknown_peaks_leave_columns_empty_and_say_why() -> None:
    columns, source = utilization(cell(), 0.1, "AMD EPYC")
    assert columns == {"mfu": None}
    assert source["peak_tflops"] is None
    assert "`AMD EPYC`" in source["peak_source"]
