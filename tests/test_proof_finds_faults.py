"""The proof before timing finds each of these mistakes of a technique, under every precision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from tests.cells import cell
from tests.data.cells_and_worlds import world as lone_world
from tests.ranks import on_ranks
from tests.training.alone import alone
from vitsweep.equivalence import WrongResultError, prove
from vitsweep.model.attention import Attend, Attention, attend
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Memory
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.training.trainer import Trainer
from vitsweep.training.update import MasterWeights
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


def weights_times(factor: float) -> Fault:
    """Compute with other weights than the optimizer updates."""

    def fault(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, i, output: factor * output)

    return fault


def scaled_by(factor: float) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=factor * q.shape[-1] ** -0.5)

    return wrong


def first_tokens_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Forget the tokens after the 32nd."""
    return attend(q, k[:, :, :32], v[:, :, :32])


def in_third_block(model: nn.Module) -> None:
    model.blocks[2].mlp.register_forward_hook(lambda m, i, output: 0.9 * output)  # type: ignore[index, union-attr]


def attend_to_padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)))


def normalise_half_of_the_images(model: nn.Module) -> None:
    def wrong(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        half = len(output) // 2
        return torch.cat([output[:half], inputs[0][half:]])

    model.blocks[1].norm_mlp.register_forward_hook(wrong)  # type: ignore[index, union-attr]


def drop_gradients_of_the_second_step(model: nn.Module) -> None:
    """As a bucket that is sent before its last gradient is there, from the second step on."""
    seen = [0]

    def wrong(gradient: Tensor) -> Tensor:
        seen[0] += 1
        return gradient if seen[0] == 1 else torch.zeros_like(gradient)

    model.blocks[0].mlp.up.weight.register_hook(wrong)  # type: ignore[index, union-attr]


FAULTS = {
    "gradients of twice the size": gradients_times(2.0),
    "a sum divided by one rank too many": gradients_times(0.5),
    "all gradients times 1.05": gradients_times(1.05),
    "one bias' gradient times 1.02": gradients_times(1.02, "blocks.0.mlp.up.bias"),
    "gradients of one matrix with the wrong sign": gradients_times(-1.0, "blocks.1.mlp.up.weight"),
    "a bias without gradient": gradients_times(0.0, "blocks.0.attention.out.bias"),
    "a branch without gradient": stop_gradient,
    "no gradient from the second step on": drop_gradients_of_the_second_step,
    "keys and values of the batch before": reuse_keys_and_values,
    "tokens shifted by one": shift_tokens,
    "weights times 1.01": weights_times(1.01),
    "the third block's MLP times 0.9": in_third_block,
    "half of the images without a norm": normalise_half_of_the_images,
    "softmax without 1 / sqrt(K)": attending(unscaled),
    "scores times 1.03": attending(scaled_by(1.03)),
    "padding is attended to": attending(attend_to_padding),
    "tokens above the 32nd are forgotten": attending(first_tokens_alone),
    "a causal mask where there is none": attending(masked),
    "swapped heads": attending(with_swapped_heads),
}
FAST = ("O1",)
PRECISIONS = ["fp32", "O0", "O1", "O2", "O3", "bf16", "bf16_params", "bf16_masters"]
BY_PRECISION = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.full) for name in PRECISIONS
]


CORE = (
    "all gradients times 1.05",
    "a bias without gradient",
    "no gradient from the second step on",
    "keys and values of the batch before",
    "weights times 1.01",
    "the third block's MLP times 0.9",
    "tokens above the 32nd are forgotten",
    "padding is attended to",
    "it never updates",
    "half of the tensors are skipped",
    "beta2 of 0.99",
    "decay of everything",
    "a state that is lost",
)
"""What `make test` breaks."""


def core_first(faults: dict[str, Any]) -> list[Any]:
    return [pytest.param(f, marks=[] if f in CORE else pytest.mark.full) for f in faults]


@pytest.mark.parametrize("precision", BY_PRECISION)
@pytest.mark.parametrize("fault", core_first(FAULTS))
def test_a_mistake_is_found_under_every_precision(fault: str, precision: str) -> None:
    spec = alone(f"precision={precision}", "batch.resolution_px=48", "data=synthetic")
    with pytest.raises(WrongResultError):
        prove(replace(spec, memory=Faulty(name="faulty", fault=FAULTS[fault])), lone_world())


@pytest.mark.parametrize("precision", BY_PRECISION)
def test_a_skipped_clip_is_found(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = alone(f"precision={precision}", "optimizer.clip_norm=0.5")
    monkeypatch.setattr(Trainer, "_clip", lambda trainer: None)
    with pytest.raises(WrongResultError):
        prove(spec, lone_world())


@dataclass(frozen=True, kw_only=True)
class BrokenAdamW(AdamW):
    """AdamW with a mistake in its optimizer."""

    fault: Callable[[Optimizer], object]

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = super().build(groups)
        self.fault(optimizer)
        return optimizer


def setting(**values: object) -> Callable[[Optimizer], object]:
    return lambda optimizer: [group.update(values) for group in optimizer.param_groups]


def after_each_step(change: Callable[[Optimizer], object]) -> Callable[[Optimizer], object]:
    return lambda optimizer: optimizer.register_step_post_hook(lambda o, a, k: change(o))


def before_each_step(change: Callable[[Optimizer], object]) -> Callable[[Optimizer], object]:
    return lambda optimizer: optimizer.register_step_pre_hook(lambda o, a, k: change(o))


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def forget_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def skip_half(optimizer: Optimizer) -> None:
    for parameter in parameters(optimizer)[::2]:
        parameter.grad = None


def correct_no_bias(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1e6)


@torch.no_grad()
def grow_weights(optimizer: Optimizer) -> None:
    parameters(optimizer)[0].mul_(1.01)


def keep_signs_alone(optimizer: Optimizer) -> None:
    for parameter in parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad.sign_()


def forget_state(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def forget_mean_square(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


OPTIMIZER_FAULTS = {
    "it never updates": before_each_step(forget_gradients),
    "half of the tensors are skipped": before_each_step(skip_half),
    "twice the learning rate": setting(lr=2e-3),
    "beta2 of 0.9": setting(betas=(0.9, 0.9)),
    "beta2 of 0.99": setting(betas=(0.9, 0.99)),
    "beta1 of 0.8": setting(betas=(0.8, 0.999)),
    "eps of 1e-4": setting(eps=1e-4),
    "no weight decay": setting(weight_decay=0.0),
    "decay of everything": setting(weight_decay=0.05),
    "no correction of the bias": before_each_step(correct_no_bias),
    "weights times 1.01": after_each_step(grow_weights),
    "signs of gradients": before_each_step(keep_signs_alone),
    "a state that is lost": after_each_step(forget_state),
    "a mean square that is lost": after_each_step(forget_mean_square),
}


@pytest.mark.parametrize("precision", BY_PRECISION)
@pytest.mark.parametrize("fault", core_first(OPTIMIZER_FAULTS))
def test_a_wrong_optimizer_is_found_under_every_precision(fault: str, precision: str) -> None:
    spec = alone(
        f"precision={precision}", "optimizer.learning_rate=0.001", "optimizer.weight_decay=0.05"
    )
    broken = BrokenAdamW(**vars(spec.optimizer), fault=OPTIMIZER_FAULTS[fault])
    with pytest.raises(WrongResultError):
        prove(replace(spec, optimizer=broken), lone_world())


def unscale_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GradScaler, "unscale_", lambda scaler, optimizer: _without_overflow(scaler, optimizer)
    )


def _without_overflow(scaler: GradScaler, optimizer: Optimizer) -> None:
    found = {torch.device("cpu"): torch.zeros(())}
    scaler._per_optimizer_states[id(optimizer)] = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": found,
    }


def half_masters(patch: pytest.MonkeyPatch) -> None:
    """Round the masters to half precision after each update: what is below a last digit is lost."""
    publish = MasterWeights.publish

    def rounded(masters: MasterWeights) -> None:
        publish(masters)
        for own, master in zip(masters._model, masters.copies, strict=True):
            master.data.copy_(own.data)

    patch.setattr(MasterWeights, "publish", rounded)


def stale_gradients(patch: pytest.MonkeyPatch) -> None:
    take, taken = MasterWeights.take_gradients, []

    def once(masters: MasterWeights) -> None:
        if not taken:
            take(masters)
            taken.extend(m.grad.clone() for m in masters.copies)
        for master, gradient in zip(masters.copies, taken, strict=True):
            master.grad = gradient.clone()

    patch.setattr(MasterWeights, "take_gradients", once)


def no_publication(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MasterWeights, "publish", lambda masters: None)


def coarse_gradients(patch: pytest.MonkeyPatch) -> None:
    """Sum gradients in a format with three bits."""
    take = MasterWeights.take_gradients

    def coarse(masters: MasterWeights) -> None:
        take(masters)
        for master in masters.copies:
            master.grad = master.grad.to(torch.float8_e4m3fn).float()

    patch.setattr(MasterWeights, "take_gradients", coarse)


def half_a_clip(patch: pytest.MonkeyPatch) -> None:
    """Clip before the gradients are unscaled."""
    clip = Trainer._clip

    def early(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1024)
        clip(trainer)

    patch.setattr(Trainer, "_clip", early)


F16 = "precision.half_dtype=float16"
HALF_FAULTS = {
    "lost unscaling": (unscale_nothing, ("precision=O2", F16)),
    "lost unscaling under autocast": (unscale_nothing, ("precision=O1", F16)),
    "masters in half precision": (half_masters, ("precision=O2",)),
    "masters in half precision, float16": (half_masters, ("precision=O2", F16)),
    "gradients of the first step": (stale_gradients, ("precision=O2",)),
    "masters that are not published": (no_publication, ("precision=O2",)),
    "gradients in three bits": (coarse_gradients, ("precision=O2",)),
    "clipping before unscaling": (half_a_clip, ("precision=O2", F16, "optimizer.clip_norm=100")),
}


@pytest.mark.parametrize("fault", HALF_FAULTS)
def test_a_mistake_of_the_half_precision_path_alone_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, choices = HALF_FAULTS[fault]
    install(monkeypatch)
    with pytest.raises(WrongResultError, match=r"in O[12] "):
        prove(alone(*choices), lone_world(), exactly=False)


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


@pytest.mark.full
@pytest.mark.parametrize("name", HONEST)
def test_honest_techniques_pass_under_every_precision(name: str, tmp_path: Path) -> None:
    assert_honest(PRECISIONS, HONEST[name], tmp_path)


def test_honest_shards_pass_under_the_precisions_of_apex(tmp_path: Path) -> None:
    assert_honest(["O1", "O2", "O3"], [("sharding=fsdp", "memory=recompute_blocks")], tmp_path)


def assert_honest(precisions: list[str], kinds: list[tuple[str, ...]], tmp_path: Path) -> None:
    specs = [
        cell(f"precision={precision}", *choices, "optimizer.clip_norm=0.5")
        for precision in precisions
        for choices in kinds
    ]
    for verdicts in on_ranks(2, _verdict, specs[0], specs, folder=tmp_path):
        assert [verdict for verdict in verdicts if not verdict.startswith("equal")] == []
