"""Blocks that drop images, and blocks of parallel branches, beside plain loops of the same."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cells import GPU_NODE, cell, entry
from tests.choices import choice
from tests.shapes import CASES, build, step
from tests.techniques.sequence_parallel.formulas import Volume
from vitsweep.model.build import build_model
from vitsweep.model.flops import train_flops
from vitsweep.model.initialize import Draws
from vitsweep.techniques.vit_block import branches

MATH = choice("attention", "sdpa_math")


def drawing(name: str, *, twin: bool = False, group: str = "vit_block", **kwargs: Any) -> Any:
    """The tiny model with a technique and the draws of seed 0."""
    model = build(**kwargs)
    vars(model)["draws"] = Draws(seed=0)
    technique = choice(group, name)
    return technique.plain_twin(model) if twin else technique.apply(model)


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_dropping_images_is_the_loop_over_images(kwargs: dict[str, Any]) -> None:
    assert_equal(
        step(drawing("drop_samples", **kwargs)), step(drawing("drop_samples", twin=True, **kwargs))
    )
    assert not torch.equal(step(drawing("drop_samples", **kwargs))[0], step(build(**kwargs))[0])


@pytest.mark.parametrize("memory", ["recompute_blocks", "recompute_selected"])
def test_a_recomputed_block_gets_the_same_images(memory: str) -> None:
    recomputed = choice("memory", memory).apply(drawing("drop_samples"))
    assert_equal(step(recomputed), step(drawing("drop_samples")))


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_parallel_branches_are_the_formula(kwargs: dict[str, Any]) -> None:
    model, plain = choice("vit_block", "parallel").apply(build(**kwargs)), build(**kwargs)
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    for block, whole in zip(model.blocks, plain.blocks, strict=True):
        normed = whole.norm_attention(x)
        wanted = x + whole.attention(normed) + whole.mlp(normed)
        torch.testing.assert_close(block(x), wanted, rtol=0, atol=0)


def test_each_branch_sees_so_many_images_as_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    add = branches.SampleDroppingBlock._add

    def noting(block: Any, x: Any, places: Any, branch: Any) -> Any:
        seen.append(tuple(places.tolist()))
        return add(block, x, places, branch)

    monkeypatch.setattr(branches.SampleDroppingBlock, "_add", noting)
    model = drawing("drop_samples")
    images = torch.randn(10, 3, 8, 8, dtype=torch.float64)
    for _ in range(50):
        model(images)
    assert {len(set(places)) for places in seen} == {6}  # rate 0.4
    assert len(set(seen)) > 100  # of 200 draws; two branches of two blocks
    often = Counter(place for places in seen for place in places)
    assert all(0.45 < often[place] / len(seen) < 0.75 for place in range(10))


def test_nothing_is_dropped_in_evaluation() -> None:
    images = torch.randn(10, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(
        drawing("drop_samples").eval()(images), build()(images), rtol=0, atol=0
    )


def test_draws_follow_from_seed_replica_step_and_forward_pass() -> None:
    like, draws, one, two = torch.zeros(1), Draws(3), torch.nn.Module(), torch.nn.Module()

    def uniform(owner: Any, replica: int = 0) -> tuple[float, ...]:
        draws.replica = replica
        return tuple(draws.uniform(owner, "test", (4,), like).tolist())

    draws.begin(0)
    first, second = uniform(one), uniform(one)
    assert uniform(two) == first != second  # stages draw alike
    with torch.no_grad():
        third = uniform(one)
        assert uniform(one) == third  # a pass without gradients does not count
    draws.begin(1)
    assert uniform(one) not in (first, second, third)
    assert uniform(two, replica=1) not in (first, second)
    draws.begin(0)
    assert uniform(one) == first  # a step that is repeated


@pytest.mark.parametrize("block", ["plain", "drop_samples", "parallel"])
def test_flops_are_those_that_are_computed(block: str) -> None:
    spec = cell(f"vit_block={block}", "attention=sdpa_math", "resources.ranks_per_node=1")
    model = build_model(spec)
    vars(model)["draws"] = Draws(0)
    model = spec.vit_block.apply(spec.attention.apply(model))
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in build_model(cell()).parameters()
    ) - (2 * 32 * 2 if block == "parallel" else 0)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randn(16, 1, 8, 8)).sum().backward()
    wanted = train_flops(spec.shape, 8, "token")
    assert counter.get_total_flops() == pytest.approx(16 * wanted, rel=1e-6)


REFUSED = {
    "vit_block.rate=0.01": "`vit_block.rate=0.01` of the 8 images of a forward pass drops none or all",
    "vit_block.rate=0.99": "`vit_block.rate=0.99` of the 8 images of a forward pass drops none or all",
    "model=axial_vit_nano": "`vit_block=drop_samples` drops whole images",
    "compilation=compile_model": "use `compilation=compile_blocks`",
    "precision=fp8": "must be divisible by 16; got 5 x 17: try `batch.images_per_step=",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_drop_images_is_refused(override: str) -> None:
    images = ["resources.ranks_per_node=2", "batch.images_per_step=16"]
    reasons = entry("vit_block=drop_samples", *images, override, machine=GPU_NODE).reasons
    assert any(REFUSED[override] in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_send_the_images_that_they_compute(steps: int) -> None:
    images = (f"batch.images_per_step={10 * steps}", f"batch.accumulation_steps={steps}")
    alone = ("resources.ranks_per_node=1", "sharding=none")
    sent = Volume.of(cell("vit_block=drop_samples", "vit_block.rate=0.4", *images, *alone))
    assert (sent.images, sent.block_images) == (10 * steps, 6 * steps)
