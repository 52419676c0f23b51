from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.choices import choice
from tests.refusals import require
from tests.shapes import CASES, NANO, assert_equal_step, build, step
from vitsweep.model.initialize import plain_name
from vitsweep.spec.technique import PrecisionPlan

ON_CPU = ["sdpa_auto", "sdpa_math", "sdpa_flash", "mha_module"]
PLANS = {
    "fp32": PrecisionPlan,
    "O1": lambda: PrecisionPlan(autocast_dtype="float16"),
    "bf16_params": lambda: PrecisionPlan(param_dtype="bfloat16"),
    "fp8": lambda: PrecisionPlan(autocast_dtype="bfloat16"),
}


def cell(device="cuda", precision="O1", model=NANO, compilation="eager", **choices):
    named = {"tensor_parallel": "none", "sequence_parallel": "none"} | choices
    return SimpleNamespace(
        resources=SimpleNamespace(device=device),
        precision=SimpleNamespace(name=precision, plan=PLANS[precision], float8=precision == "fp8"),
        compilation=choice("compilation", compilation),
        model=model,
        transformer=model,
        **{group: choice(group, name) for group, name in named.items()},
    )


def reasons(name, **kwargs):
    return list(choice("attention", name).conflicts(cell(**kwargs)))


def test_every_kernel_gives_the_gradients_of_the_reference_model():
    for kwargs in CASES.values():
        for name in ON_CPU:
            assert_equal_step(choice("attention", name).apply, **kwargs)


@pytest.mark.parametrize("name", ON_CPU)
def test_evaluation_gives_the_outputs_of_the_reference_model(name):
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    plain = build().eval()
    model = choice("attention", name).apply(build()).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images), plain(images), rtol=1e-12, atol=1e-12)


def test_flex_gives_the_outputs_of_the_reference_model(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled: the compiled kernel is for CUDA, and only there trained with.
    monkeypatch.setattr(
        "vitsweep.techniques.attention.kernels._compiled_flex", lambda: flex_attention
    )
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        plain = build(dtype=torch.float32)(images)
        flex = choice("attention", "flex").apply(build(dtype=torch.float32))(images)

    torch.testing.assert_close(flex, plain, rtol=1e-5, atol=1e-6)


def test_mha_module_holds_the_very_parameters_it_replaces():
    model = build()
    before = dict(model.named_parameters())
    choice("attention", "mha_module").apply(model)
    after = {plain_name(name): p for name, p in model.named_parameters()}

    assert isinstance(model.blocks[0].attention, torch.nn.MultiheadAttention)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_mha_module_keeps_half_precision_where_math_does_not():
    """In 2022 the module multiplied in the dtype of its input."""
    seen = {}
    for name in ("mha_module", "sdpa_math"):
        model = choice("attention", name).apply(build(dtype=torch.bfloat16))
        with torch.profiler.profile(record_shapes=True) as profile:
            step(model)
        seen[name] = {e.key for e in profile.key_averages()}

    assert "aten::_scaled_dot_product_attention_math" not in seen["mha_module"]
    assert "aten::_scaled_dot_product_attention_math" in seen["sdpa_math"]


@pytest.mark.parametrize("name", ["sdpa_math", "mha_module"])
def test_kernels_that_keep_the_scores_compute_them_once(name):
    from vitsweep.model.flops import train_flops

    kernel = choice("attention", name)
    counter = FlopCounterMode(display=False)
    with counter:
        step(kernel.apply(build()))

    assert not kernel.recomputes_scores
    assert counter.get_total_flops() == 3 * train_flops(NANO, 8, "token")


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn"])
def test_kernels_of_cuda_are_refused_on_cpu(name):
    (reason,) = reasons(name, device="cpu")

    ways_out = "`attention=sdpa_flash` `attention=sdpa_auto`"
    require(reason, f"`attention={name}` `resources.device=cuda` {ways_out}")
    assert "got cpu" in reason


@pytest.mark.parametrize("name", ON_CPU)
def test_what_runs_on_cpu_is_not_refused_there(name):
    assert not reasons(name, device="cpu", precision="fp32")


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn"])
def test_half_precision_kernels_are_refused_in_float32_on_cuda(name):
    (reason,) = reasons(name, precision="fp32")

    require(reason, f"`attention={name}` `precision=fp32` `precision=O1`")
    assert not reasons(name, precision="O1")
    assert not reasons(name, precision="bf16_params")
    assert not reasons("sdpa_efficient", precision="fp32")


def test_flex_refuses_what_it_cannot_train():
    (reason,) = reasons("flex", device="cpu")
    require(reason, "`attention=flex`")
    assert "got cpu" in reason

    assert not reasons("flex")


def test_mha_module_refuses_what_works_on_linears():
    (reason,) = reasons("mha_module", tensor_parallel="megatron")
    require(reason, "`attention=mha_module` `tensor_parallel=megatron`")
    (reason,) = reasons("mha_module", sequence_parallel="ulysses")
    assert "`attention=sdpa_math`" in reason
    (reason,) = reasons("mha_module", precision="fp8")
    assert "`precision=fp8`" in reason
