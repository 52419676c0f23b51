"""Patches that are dropped, and registers, beside plain loops and formulas."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cells import cell, entry
from tests.choices import choice
from tests.shapes import CASES, NANO, build, replace, step
from tests.techniques.vit_block.test_block import assert_equal, drawing
from vitsweep.model.build import build_model
from vitsweep.model.flops import train_flops
from vitsweep.model.initialize import Draws


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_dropping_tokens_is_the_loop_over_images(kwargs: dict[str, Any]) -> None:
    found = step(drawing("drop", group="tokens", **kwargs))
    assert_equal(found, step(drawing("drop", twin=True, group="tokens", **kwargs)))
    assert not torch.equal(found[0], step(build(**kwargs))[0])


def test_class_token_and_registers_stay_and_each_image_keeps_patches_of_its_own() -> None:
    spec = replace(NANO, registers=2)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for batch_first in (True, False):
        whole = build(spec, batch_first=batch_first)
        found = drawing("drop", group="tokens", spec=spec, batch_first=batch_first)
        every, kept = whole.embedding(images), found.embedding(images)
        if not batch_first:
            every, kept = every.transpose(0, 1), kept.transpose(0, 1)
        assert kept.shape == (4, 3 + 8, 32)  # half of 16 patches
        torch.testing.assert_close(kept[:, :3], every[:, :3], rtol=0, atol=0)
        chosen = [
            tuple(int((row == patch).all(-1).nonzero()) for patch in patches)
            for row, patches in zip(every, kept[:, 3:], strict=True)
        ]
        assert all(places == tuple(sorted(set(places))) for places in chosen)
        assert len(set(chosen)) == 4


def test_nothing_is_dropped_in_evaluation() -> None:
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    found = drawing("drop", group="tokens").eval()(images)
    torch.testing.assert_close(found, build()(images), rtol=0, atol=0)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_registers_lie_before_the_patches_and_no_head_reads_them(
    pooling: str, batch_first: bool
) -> None:
    kwargs: dict[str, Any] = {"pooling": pooling, "batch_first": batch_first}
    spec = replace(NANO, registers=3)
    model, plain = build(spec, **kwargs), build(replace(spec, registers=0), **kwargs)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x, without = model.embedding(images), plain.embedding(images)
    if not batch_first:
        x, without = x.transpose(0, 1), without.transpose(0, 1)
    first = int(pooling == "token")
    torch.testing.assert_close(x[:, :first], without[:, :first], rtol=0, atol=0)
    torch.testing.assert_close(
        x[:, first : first + 3], model.embedding.registers.expand(2, 3, -1), rtol=0, atol=0
    )
    torch.testing.assert_close(x[:, first + 3 :], without[:, first:], rtol=0, atol=0)
    # Without blocks registers change nothing.
    torch.testing.assert_close(
        model.read_out(model.embedding(images)),
        plain.read_out(plain.embedding(images)),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["tokens=all"], 17),
        (["tokens=drop"], 9),
        (["tokens=drop", "tokens.keep=0.1", "classifier=pooled"], 2),
        (["tokens=registers"], 21),
        (["tokens=registers", "tokens.count=3", "model.registers=2"], 22),
        (["tokens=drop", "model.registers=4"], 13),
    ],
)
def test_flops_and_parameters_count_the_tokens_of_the_blocks(
    overrides: list[str], tokens: int
) -> None:
    spec = cell(*overrides, "attention=sdpa_math")
    assert spec.num_tokens == tokens
    model = build_model(spec)
    vars(model)["draws"] = Draws(0)
    model = spec.tokens.apply(spec.attention.apply(model))
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randn(16, 1, 8, 8)).sum().backward()
    assert counter.get_total_flops() == 16 * train_flops(spec.shape, 8, spec.classifier.pooling)


REFUSED = {
    ("tokens.keep=0.01",): "of 16 patches keeps 0, and at least one must stay and one go",
    ("tokens.keep=0.99",): "of 16 patches keeps 16, and at least one must stay and one go",
    ("model=axial_vit_nano",): "`tokens=drop` changes the number of tokens",
    ("sequence_parallel=ulysses", "task=train"): "`tokens=drop` has fewer tokens in training",
    ("compilation=compile_model",): "use `compilation=compile_blocks`",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_cannot_drop_tokens_is_refused(overrides: tuple[str, ...]) -> None:
    reasons = entry("tokens=drop", *overrides).reasons
    assert any(REFUSED[overrides] in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


def test_registers_need_a_number() -> None:
    with pytest.raises(Exception, match=r"`tokens\.count=0`"):
        choice("tokens", "registers", count=0)
