import pytest
import torch
from torch.utils import flop_counter

from tests.shapes import NANO, build, replace, step
from vitsweep.model import flops

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
    "tokens_per_channel": replace(NANO, tokens_per_channel=True),
    "dense": replace(NANO, head="dense"),
    "uneven": replace(NANO, width=48, num_heads=3, mlp_width=80, patch_px=4, num_classes=7),
}
IMAGES = 3


def counted(model, spec) -> int:
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)
    with counter:
        step(model, spec)
    return counter.get_total_flops()


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_forward_flops_equal_those_of_the_counter(spec, pooling):
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_FLASH)
    with counter, torch.no_grad():
        build(spec, pooling=pooling)(torch.zeros(IMAGES, 3, 8, 8, dtype=torch.float64))

    assert counter.get_total_flops() == IMAGES * flops.forward_flops(spec, 8, pooling)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_train_flops_and_recomputed_scores_equal_the_counter(spec, pooling):
    model_flops = flops.train_flops(spec, 8, pooling)
    scores = flops.recomputed_score_flops(spec, 8, pooling)
    # torch's counter forgets the groups of a convolution in the gradient of its filters.
    forgotten = flops._patch_flops(spec, 8) * (2 if spec.tokens_per_channel else 0)

    counted_flops = counted(build(spec, pooling=pooling), spec)
    assert counted_flops == IMAGES * (model_flops + scores + forgotten)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_from_the_shape(spec, pooling):
    model = build(spec, pooling=pooling)

    assert flops.num_parameters(spec, 8, pooling) == sum(p.numel() for p in model.parameters())
