import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.shapes import CASES, NANO, build, replace, step

SHAPES = {
    "plain": NANO,
}


def test_batch_second_equals_batch_first():
    for pooling in ["token", "mean"]:
        for spec in SHAPES.values():
            for channels_last in [False, True]:
                first = step(build(spec, pooling=pooling), spec)
                second = step(
                    build(spec, pooling=pooling, batch_first=False, channels_last=channels_last),
                    spec,
                )

                torch.testing.assert_close(second, first, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("order", [{}, {"batch_first": False}, {"channels_last": True}], ids=str)
def test_patches_as_one_product_equal_the_convolution(spec, order):
    plain, found = (
        step(build(spec, **order, linear_patches=linear), spec) for linear in (False, True)
    )
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_patches_as_one_product_reach_no_convolution():
    with FlopCounterMode(display=False) as counter:
        step(build(linear_patches=True))
    [counts] = {tuple(each) for name, each in counter.get_flop_counts().items() if name == "Global"}
    assert torch.ops.aten.convolution not in counts
    with FlopCounterMode(display=False) as convolved:
        step(build())
    assert counter.get_total_flops() == convolved.get_total_flops()


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_every_parameter_has_a_gradient_in_the_first_step(spec):
    for name, gradient in step(build(spec), spec)[1].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name


def test_the_same_seed_gives_the_same_weights_in_every_layout():
    first, second = build(), build(batch_first=False, channels_last=True)

    torch.testing.assert_close(dict(first.named_parameters()), dict(second.named_parameters()))


def test_the_first_loss_is_near_that_of_a_guess():
    spec = replace(NANO, num_classes=1000)
    logits, _ = step(build(spec), spec)
    loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    assert loss == pytest.approx(math.log(1000), rel=0.05)


def test_only_a_class_token_that_is_read_exists():
    assert build(pooling="token").embedding.class_token is not None
    assert build(pooling="mean").embedding.class_token is None


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_blocks_see_tokens_in_the_order_asked_for_and_side_by_side(kwargs):
    model, seen = build(**kwargs), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    step(model)
    tokens = NANO.num_tokens(8, kwargs["pooling"])
    shape = (3, tokens, 32) if kwargs.get("batch_first", True) else (tokens, 3, 32)

    assert [tuple(x.shape) for x in seen] == [shape] * NANO.depth
    assert all(x.is_contiguous() for x in seen)


def test_batch_second_blocks_copy_no_more_than_batch_first_blocks():
    """A transpose that moves elements would undo the layout; views cost nothing."""
    copies = {}
    for batch_first, shape in ((True, (3, 16, 32)), (False, (16, 3, 32))):
        block = build(batch_first=batch_first).blocks[0]
        with torch.profiler.profile() as profile:
            block(torch.randn(shape, dtype=torch.float64))
        names = [event.name for event in profile.events()]
        copies[batch_first] = sum(n in ("aten::clone", "aten::contiguous") for n in names)

    assert copies == {True: 0, False: 0}


def test_an_image_of_another_size_is_refused():
    with pytest.raises(RuntimeError):
        build()(torch.zeros(1, 3, 16, 16, dtype=torch.float64))
