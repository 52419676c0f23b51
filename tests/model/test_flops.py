import pytest
import torch
from torch.utils import flop_counter

from tests.choices import choice
from tests.flops import recomputed_score_flops
from tests.shapes import NANO, build, replace, step
from vitsweep.model import flops
from vitsweep.model.attention import Attention
from vitsweep.spec.technique import AttentionPattern

aten = torch.ops.aten
CPU_FLASH = {  # torch's counter knows this kernel on CUDA only, and would count nothing for it here
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        flop_counter.sdpa_flop_count(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        flop_counter.sdpa_backward_flop_count(grad, q, k, v)
    ),
}
SHAPES = {
    "plain": NANO,
    "registers": replace(NANO, registers=3),
    "dinov2": replace(NANO, registers=1, mlp="swiglu", layer_scale=0.5),
    "uneven": replace(NANO, width=48, num_heads=3, mlp_width=80, patch_px=4, num_classes=7),
}
IMAGES = 3


def counted(model, spec) -> int:
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)
    with counter:
        step(model, spec)
    return counter.get_total_flops()


def test_forward_flops_equal_those_of_the_counter():
    for pooling in ["token", "mean"]:
        for spec in SHAPES.values():
            counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)
            with counter, torch.no_grad():
                build(spec, pooling=pooling)(torch.zeros(IMAGES, 3, 8, 8, dtype=torch.float64))

            assert counter.get_total_flops() == IMAGES * flops.forward_flops(spec, 8, pooling)


def test_train_flops_and_recomputed_scores_equal_the_counter():
    for pooling in ["token", "mean"]:
        for spec in SHAPES.values():
            model_flops = flops.train_flops(spec, 8, pooling)
            scores = recomputed_score_flops(spec, 8, pooling)

            counted_flops = counted(build(spec, pooling=pooling), spec)
            assert counted_flops == IMAGES * (model_flops + scores)


def test_parameters_are_counted_from_the_shape():
    for pooling in ["token", "mean"]:
        for spec in SHAPES.values():
            model = build(spec, pooling=pooling)

            assert flops.num_parameters(spec, 8, pooling) == sum(
                p.numel() for p in model.parameters()
            )


def with_kernel(model, function):
    """The model with another attention than its own."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = function
    return model


def row_by_row(q, k, v):
    """Causal attention that computes nothing that is masked."""
    rows = []
    for t in range(q.shape[2]):
        scores = q[:, :, t : t + 1] @ k[:, :, : t + 1].mT
        rows.append(scores.softmax(-1) @ v[:, :, : t + 1])
    return torch.cat(rows, 2)


def state_by_state(q, k, v):
    """Causal linear attention as its recurrence: each token is added to a state and reads it."""
    rows, state = [], 0
    for t in range(q.shape[2]):
        state = state + k[:, :, t : t + 1].mT @ v[:, :, t : t + 1]
        rows.append(q[:, :, t : t + 1] @ state)
    return torch.cat(rows, 2)


ATTENTIONS = {
    "causal": (row_by_row, AttentionPattern(causal=True)),
    "linear causal": (state_by_state, AttentionPattern(causal=True, linear=True)),
}


@pytest.mark.parametrize("spec", [NANO, SHAPES["uneven"]], ids=["plain", "uneven"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_flops_under_a_mask_are_those_of_a_computation_without_waste(name, spec):
    function, products = ATTENTIONS[name]
    model = with_kernel(build(spec, pooling="mean"), function)

    assert counted(model, spec) == IMAGES * flops.train_flops(spec, 8, "mean", products)


@pytest.mark.parametrize("spec", [NANO, SHAPES["uneven"]], ids=["plain", "uneven"])
def test_flops_of_linear_attention_equal_those_of_the_counter(spec):
    kernel = choice("attention", "linear")
    model = kernel.apply(build(spec, pooling="mean"))

    assert kernel.attention_pattern == AttentionPattern(linear=True)
    assert counted(model, spec) == IMAGES * flops.train_flops(
        spec, 8, "mean", kernel.attention_pattern
    )


def test_a_mask_and_states_take_the_flops_that_their_formulas_say():
    """By hand, for the two blocks of the nano ViT: T=16, D=32, H=2, K=16."""
    plain, causal, linear = (
        flops.forward_flops(NANO, 8, "mean", products)
        for products in (
            AttentionPattern(),
            AttentionPattern(causal=True),
            AttentionPattern(linear=True),
        )
    )
    assert plain - causal == 2 * 4 * 32 * (16 * 16 - 16 * 17 // 2)
    assert plain - linear == 2 * 4 * 32 * (16 * 16 - 16 * 16)
