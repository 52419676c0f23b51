"""The proof before timing finds each of these mistakes of a technique, under every precision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cells import cell
from tests.data.cells_and_worlds import world as lone_world
from tests.ranks import on_ranks
from tests.training.alone import alone
from vitsweep.equivalence import WrongResultError, prove
from vitsweep.model.attention import Attend, Attention, attend
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Memory
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

Fault = Callable[[nn.Module], object]


@dataclass(frozen=True, kw_only=True)
class Faulty(Memory):
    """A technique with a mistake."""

    fault: Fault

    def apply(self, model: nn.Module) -> nn.Module:
        self.fault(model)
        return model


def gradients_times(factor: float, part: str = "") -> Fault:
    def fault(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.register_hook(lambda gradient: factor * gradient)

    return fault


def attending(wrong: Attend) -> Fault:
    def fault(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = wrong

    return fault


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_swapped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v).flip(1)


def reuse_keys_and_values(model: nn.Module) -> None:
    """Attend to the batch before, as where a message is read before it has arrived."""
    kept: dict[Attention, tuple[Tensor, Tensor]] = {}

    def wrong(module: Attention) -> Attend:
        def stale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before = kept.get(module, (k, v))
            kept[module] = (k.detach(), v.detach())
            return attend(q, *before)

        return stale

    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = wrong(module)


def stop_gradient(model: nn.Module) -> None:
    model.blocks[0].mlp.register_forward_hook(lambda m, i, output: output.detach())  # type: ignore[index, union-attr]


def shift_tokens(model: nn.Module) -> None:
    model.embedding.register_forward_hook(lambda m, i, tokens: tokens.roll(1, 1))  # type: ignore[union-attr]


FAULTS = {
    "gradients of twice the size": gradients_times(2.0),
    "a sum divided by one rank too many": gradients_times(0.5),
    "gradients of one matrix with the wrong sign": gradients_times(-1.0, "blocks.1.mlp.up.weight"),
    "a bias without gradient": gradients_times(0.0, "blocks.0.attention.out.bias"),
    "a branch without gradient": stop_gradient,
    "keys and values of the batch before": reuse_keys_and_values,
    "tokens shifted by one": shift_tokens,
    "softmax without 1 / sqrt(K)": attending(unscaled),
    "a causal mask where there is none": attending(masked),
    "swapped heads": attending(with_swapped_heads),
}
FAST = ("fp32", "O1")
PRECISIONS = ["fp32", "O0", "O1", "O2", "O3", "bf16", "bf16_params", "bf16_masters"]
BY_PRECISION = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.full) for name in PRECISIONS
]


@pytest.mark.parametrize("precision", BY_PRECISION)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_under_every_precision(fault: str, precision: str) -> None:
    spec = alone(f"precision={precision}")
    with pytest.raises(WrongResultError):
        prove(replace(spec, memory=Faulty(name="faulty", fault=FAULTS[fault])), lone_world())


@pytest.mark.parametrize("precision", BY_PRECISION)
def test_a_skipped_clip_is_found(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = alone(f"precision={precision}", "optimizer.clip_norm=0.5")
    monkeypatch.setattr(Trainer, "_clip", lambda trainer: None)
    with pytest.raises(WrongResultError):
        prove(spec, lone_world())


@dataclass(frozen=True, kw_only=True)
class WithoutExchange(Ddp):
    """Each rank keeps its own gradients."""

    def apply(self, model: nn.Module, plan: object, world: World) -> nn.Module:
        return model


def _verdict(world: World, specs: list[CellSpec]) -> list[str]:
    found = []
    for spec in specs:
        try:
            found.append(f"equal {prove(spec, world):.1e}")
        except WrongResultError as error:
            found.append(str(error))
    return found


def test_gradients_of_one_rank_alone_are_found_on_all_ranks(tmp_path: Path) -> None:
    specs = [cell(f"precision={precision}") for precision in PRECISIONS]
    wrong = [
        replace(
            spec,
            sharding=WithoutExchange(
                name="ddp",
                bucket_mib=25.0,
                gradient_as_bucket_view=True,
                static_graph=False,
                gradient_dtype=None,
            ),
        )
        for spec in specs
    ]
    for verdicts in on_ranks(2, _verdict, wrong[0], wrong, folder=tmp_path):
        assert [verdict for verdict in verdicts if verdict.startswith("equal")] == []


HONEST = {
    "ddp": [("sharding=ddp",), ("sharding=zero1",)],
    "fsdp": [("sharding=fsdp",), ("sharding=zero2", "memory=recompute_blocks")],
    "tensor": [("tensor_parallel=megatron",), ("sequence_parallel=megatron_sp",)],
    "ulysses": [("sequence_parallel=ulysses",), ("sequence_parallel=ulysses", "sharding=zero1")],
    "pipeline": [("pipeline_parallel=gpipe", "batch.images_per_step=32")],
}


@pytest.mark.parametrize(
    "name",
    [n if n == "fsdp" else pytest.param(n, marks=pytest.mark.full) for n in HONEST],
)
def test_honest_techniques_pass_under_every_precision(name: str, tmp_path: Path) -> None:
    specs = [
        cell(f"precision={precision}", *choices, "optimizer.clip_norm=0.5")
        for precision in PRECISIONS
        for choices in HONEST[name]
    ]
    for verdicts in on_ranks(2, _verdict, specs[0], specs, folder=tmp_path):
        assert [verdict for verdict in verdicts if not verdict.startswith("equal")] == []
