"""The nano twin and the reference model: sizes, shares, scales and rounding noise by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cells import GPU_NODE, cell
from tests.data.cells_and_worlds import world
from tests.training.alone import alone
from vitsweep.proof import reference, twin
from vitsweep.proof.reference import (
    RoundingNoise,
    _cast,
    _close,
    _norm_with_wide_sums,
    cut,
    is_cut,
    plain_model,
    shares_of,
)
from vitsweep.proof.twin import (
    exact_twin,
    global_batch,
    mean_over_replicas,
    my_share,
    not_proved,
    step_that_counts,
    twin_of,
    without,
)
from vitsweep.spec.model_spec import least_alike


def test_the_least_number_with_the_remainder_of_another() -> None:
    for wanted, least, unit, found in (
        (10, 16, 1, 16), (1000, 16, 8, 16), (1001, 16, 8, 17), (10, 16, 4, 18), (17, 16, 4, 17),
    ):  # fmt: skip
        assert least_alike(wanted, least, unit) == found, (wanted, least, unit)


def test_a_twin_has_a_few_images_for_each_forward_pass() -> None:
    for words, images, depth in (
        (["batch.images_per_step=64"], 4, 3),
        (["batch.images_per_step=2"], 6, 3),
        (["batch.images_per_step=66"], 6, 3),
        (["batch.images_per_step=64", "batch.accumulation_steps=4"], 16, 3),
        (
            [
                "batch.images_per_step=64",
                "precision=fp8",
                "precision.emulate=true",
                "precision.layers=all",
            ],
            16,
            3,
        ),
    ):
        found = twin_of(alone(*words))
        assert (found.images_per_step, found.model.depth) == (images, depth), words
        assert found.batch.accumulation_steps == alone(*words).batch.accumulation_steps
    staged = (
        "pipeline_parallel=gpipe",
        "resources.ranks_per_node=4",
        "model.depth=8",
        "sharding=none",
    )
    found = twin_of(cell(*staged, "pipeline_parallel.microbatches=4", "batch.images_per_step=64"))
    assert (found.images_per_step, found.model.depth) == (16, 5)


def test_the_exact_twin_replaces_what_half_precision_alone_has() -> None:
    two = ("resources.ranks_per_node=2", "sharding=ddp")
    half = exact_twin(twin_of(cell(*two, "sharding.gradient_dtype=bfloat16", "precision=bf16")))
    assert half.sharding.gradient_dtype is None  # type: ignore[attr-defined]
    assert half.precision.plan().param_dtype == "float64"
    own = alone("precision.dtype=float64")
    assert exact_twin(own) == own
    flash = ("attention=sdpa_flash", "precision=bf16", "data=synthetic")
    on_gpu = exact_twin(twin_of(cell(*flash, machine=GPU_NODE)))
    assert (on_gpu.precision.plan().param_dtype, on_gpu.attention.backend) == ("float32", "math")  # type: ignore[attr-defined]
    here = exact_twin(twin_of(alone("attention=sdpa_flash")))
    assert here.attention.backend == "flash"  # type: ignore[attr-defined]


def of_replicas(replicas: int, **drawing: bool) -> Any:
    draws = {"vit_block": False, "tokens": False} | drawing
    return SimpleNamespace(
        mesh=SimpleNamespace(data_parallel_size=replicas),
        batch=SimpleNamespace(accumulation_steps=1),
        pipeline_parallel=SimpleNamespace(microbatches=1),
        model=SimpleNamespace(norms_over_batch=False),
        objective=SimpleNamespace(draws=False, couples_images=False),
        **{name: SimpleNamespace(draws=draw) for name, draw in draws.items()},
    )


def test_many_replicas_share_what_they_compute_unless_each_draws_for_itself() -> None:
    for replicas, shares in (
        (1, 1),
        (64, 64),
        (65, 13),
        (66, 33),
        (67, 67),
        (72, 36),
        (128, 64),
        (2048, 64),
    ):
        assert shares_of(of_replicas(replicas)) == shares
        assert shares_of(of_replicas(replicas, vit_block=True)) == replicas
        assert shares_of(of_replicas(replicas, tokens=True)) == replicas
    assert [is_cut(of_replicas(replicas)) for replicas in (1, 2, 3)] == [False, True, False]
    assert is_cut(of_replicas(1, tokens=True))
    assert is_cut(of_replicas(4, vit_block=True))
    for part in ("batch.accumulation_steps", "pipeline_parallel.microbatches"):
        two = of_replicas(1)
        owner, name = part.split(".")
        setattr(getattr(two, owner), name, 2)
        assert is_cut(two), part


def test_a_batch_is_cut_into_equal_parts_in_order() -> None:
    batch = {"a": torch.arange(6), "b": "word"}
    cuts: list[Any] = cut(batch, 3)  # type: ignore[arg-type]
    assert [part["a"].tolist() for part in cuts] == [[0, 1], [2, 3], [4, 5]]
    assert {part["b"] for part in cuts} == {"word"}
    spec = twin_of(cell("resources.ranks_per_node=2", "sharding=ddp", "batch.accumulation_steps=2"))
    images = torch.arange(spec.images_per_step)
    shares = [my_share(spec, (images, images), world(rank, replicate=2)) for rank in range(2)]
    found = [part[0] for share in shares for part in share]
    assert torch.equal(torch.cat(found), images)
    assert [len(share) for share in shares] == [2, 2]


def test_batches_of_steps_differ_and_follow_the_seed() -> None:
    spec = twin_of(alone())
    first, again, second = (global_batch(spec, step, world())["image"] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    other = global_batch(replace(spec, seed=spec.seed + 1), 0, world())["image"]
    assert not torch.equal(first, other)
    assert mean_over_replicas(torch.tensor(3.0), world()) == 3.0


def test_what_is_not_proved_is_named() -> None:
    assert not_proved(alone()) == []
    assert not_proved(alone("averaging=ema")) == []
    [draws] = not_proved(alone("objective=lejepa"))
    assert "objective=lejepa" in draws
    assert not_proved(alone("task=train", "task.epochs=1")) == ["task=train after the timed steps"]


class Overflowing:
    """A trainer whose first steps overflow."""

    def __init__(self, overflows: int, scales: bool = True) -> None:
        self.overflows, self.steps = overflows, list[int]()
        self.skipped = [torch.tensor(0.0)] * scales
        self.steps_taken = 0

    def step(self, stream: Any) -> Tensor:
        assert list(stream) == ["batch"]
        self.steps.append(self.steps_taken)
        self.steps_taken += 1
        if self.skipped:
            self.skipped.append(torch.tensor(float(len(self.steps) <= self.overflows)))
        return torch.tensor(float(len(self.steps)))


def test_a_step_is_repeated_until_it_updates_and_twenty_times_at_most() -> None:
    for overflows, taken in ((0, 1), (3, 4), (50, 20)):
        trainer = Overflowing(overflows)
        assert float(step_that_counts(trainer, ["batch"], 5)) == taken  # type: ignore[arg-type, list-item]
        assert trainer.steps == [5] * taken
    assert float(step_that_counts(Overflowing(3, scales=False), ["batch"], 0)) == 1  # type: ignore[arg-type, list-item]
    assert twin.HALVINGS == 20


def test_noise_moves_a_result_by_less_than_its_roundoff_and_leaves_views_and_selections() -> None:
    x = torch.full((1000,), 1.5)
    exact = 2 * x
    with RoundingNoise(0):
        moved, view, largest = 2 * x, x.view(10, 100), x.amax()
        whole, inplace = torch.ones(3, dtype=torch.int64) * 2, x.clone().mul_(2)
        parts = torch.var_mean(x)
    apart = (moved - exact).abs() / 3
    assert 0 < float(apart.max()) <= 2.0**-23
    assert torch.equal(view.flatten(), x)
    assert float(largest) == 1.5
    assert whole.tolist() == [2, 2, 2]
    assert torch.equal(inplace, exact) or float((inplace - exact).abs().max()) <= 3 * 2.0**-23
    assert float(parts[1]) == pytest.approx(1.5, abs=1e-6)
    with RoundingNoise(0):
        again = 2 * x
    with RoundingNoise(1):
        other = 2 * x
    assert torch.equal(again, moved)
    assert not torch.equal(other, moved)
    with RoundingNoise(0, least=0.01):
        coarse = 2 * x
        double = 2 * x.double()
        masked = torch.full((3,), -torch.inf) + 0
    spread = (coarse - exact).abs() / 3
    assert 0.005 < float(spread.max()) <= 0.01
    assert torch.equal(double, exact.double()), "float64 has digits to spare"
    assert masked.tolist() == [-torch.inf] * 3
    rounded = x.bfloat16()
    with RoundingNoise(0):
        half = 2 * rounded
    assert {*half.tolist()} == {3 - 2.0**-6, 3.0, 3 + 2.0**-6}


def test_tensors_are_close_by_sums_in_another_order() -> None:
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    allowed = 1000 * 2.0**-52 * 5
    for share, is_close in ((0.9, True), (1.1, False)):
        assert _close(a, a + torch.tensor([0.0, share * allowed])) is is_close
    assert _close(torch.tensor([1]), torch.tensor([1]))
    assert not _close(torch.tensor([1]), torch.tensor([2]))


def test_a_cast_keeps_whole_numbers_and_widens_complex_ones() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("waves", torch.tensor(1j))
    for dtype, beside in ((torch.float64, torch.complex128), (torch.bfloat16, torch.complex128)):
        _cast(model, dtype)
        assert (model.weight.dtype, model.count.dtype, model.waves.dtype) == (
            dtype,
            torch.int64,
            beside,
        )


@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_norms_in_half_have_gradients_that_are_summed_in_float32(affine: str) -> None:
    rows = 4096
    norm = nn.LayerNorm(4, elementwise_affine=affine != "none", bias=affine == "both").bfloat16()
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = _norm_with_wide_sums(norm, True, x)
    torch.testing.assert_close(y, norm(x))
    if affine == "none":
        return
    y.float().sum().backward()
    wide = nn.functional.layer_norm(x.float(), (4,), eps=norm.eps)
    torch.testing.assert_close(norm.weight.grad.float(), wide.sum(0), rtol=1e-2, atol=0.5)  # type: ignore[union-attr]
    if affine == "both":
        assert norm.bias.grad.tolist() == [rows] * 4  # type: ignore[union-attr]
    plain = nn.LayerNorm(4)
    found = _norm_with_wide_sums(plain, False, x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, plain(x.float()).bfloat16())


def test_the_reference_scales_and_clips_as_the_cell_says() -> None:
    device = torch.device("cpu")
    base = alone("precision.dtype=float64")
    spec = twin_of(base)
    batch = global_batch(spec, 0, world())
    batch = batch["image"].double(), batch["label"]
    model = reference.PlainModel(spec, device)
    weights = {n: p.detach().clone() for n, p in model.named_parameters().items()}
    plain = model.step(weights, {}, batch, 0)
    norm = sum(float(g.square().sum()) for g in plain.gradients.values()) ** 0.5
    for share in (0.5, 2.0):
        optimizer = replace(spec.optimizer, clip_norm=share * norm)
        clipped = reference.PlainModel(replace(spec, optimizer=optimizer), device).step(
            weights, {}, batch, 0
        )
        factor = min(1.0, share * norm / (norm + 1e-6))
        for name, gradient in clipped.gradients.items():
            torch.testing.assert_close(gradient, factor * plain.gradients[name])
    assert plain_model(spec, device).draws.seed == spec.seed  # type: ignore[union-attr]


def test_a_choice_is_replaced_by_the_plain_one_in_the_same_ranks() -> None:
    four = ("resources.ranks_per_node=4", "precision=O2", "optimizer=adamw_fused",
            "optimizer.clip_norm=0.5", "sharding=fsdp", "sequence_parallel=ulysses", "mesh.ulysses=2",
            "sharding.reshard_after_forward=false")  # fmt: skip
    spec = twin_of(cell(*four))
    found = without(spec, ["sharding"])
    assert found
    assert (found.sharding.name, found.mesh.replicate, found.mesh.shard) == ("ddp", 2, 1)
    assert found.sharding == twin_of(replace(spec, sharding=found.sharding)).sharding, "its buckets"
    found = without(spec, ["sequence_parallel"])
    assert found
    assert (found.mesh.replicate, found.mesh.shard) == (1, 4), "which FSDP takes"
    found = without(spec, ["sequence_parallel", "sharding", "precision", "optimizer", twin.CLIP])
    assert found
    assert found.mesh.replicate == found.mesh.data_parallel_size == 4
    assert (found.precision.name, found.sequence_parallel.name) == ("fp32", "none")
    assert (found.optimizer.implementation, found.optimizer.clip_norm) == ("loop", None)  # type: ignore[attr-defined]
    assert without(found, ["sharding"]) is None
    assert without(found, ["optimizer"]) is None
    assert without(found, ["memory"]) is None


def test_a_choice_that_another_one_needs_is_not_replaced() -> None:
    linear = ("sequence_parallel=lasp", "attention=linear", "classifier=pooled")
    spec = twin_of(cell("resources.ranks_per_node=2", *linear))
    assert without(spec, ["attention"]) is None
    assert without(spec, ["sequence_parallel"])
    both = twin_of(cell("resources.ranks_per_node=2", "tensor_parallel=megatron",
                        "sequence_parallel=megatron_sp"))  # fmt: skip
    found = without(both, ["sequence_parallel"])
    assert found
    assert found.mesh.tensor == 2, "the other one uses it"


def test_one_replica_without_its_sharding_has_none() -> None:
    found = without(twin_of(cell("resources.ranks_per_node=1", "sharding=zero1")), ["sharding"])
    assert found
    assert found.sharding.name == "none"
