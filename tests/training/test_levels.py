"""apex's O2 and O3 against loops written out here, step by step and bit by bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.training.alone import alone, batch, trainer_of, weights
from vitsweep.model.build import build_model
from vitsweep.spec.cell_spec import CellSpec

STEPS = 4
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
SGD = (
    "optimizer=sgd_loop",
    f"optimizer.learning_rate={RATE}",
    f"optimizer.momentum={MOMENTUM}",
    f"optimizer.weight_decay={DECAY}",
)
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ADAMW = ("optimizer=adamw_loop", "optimizer.learning_rate=0.003")


class NormInFloat32(nn.Module):
    """LayerNorm with float32 weights between half-precision contention."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        normed = centred / (variance + self.eps).sqrt() * self.weight + self.bias
        return normed.to(x.dtype)


class NormInHalf(nn.Module):
    """LayerNorm whose parameters' gradients are summed in float32."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.detach(), self.bias.detach()

        def sum_up(upstream: Tensor) -> None:
            normed = F.layer_norm(x.detach(), x.shape[-1:], eps=self.eps)
            self.weight.grad = (normed * upstream).sum((0, 1))
            self.bias.grad = upstream.sum((0, 1))

        y = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        y.register_hook(sum_up)
        return y


def plain(spec: CellSpec) -> nn.Module:
    torch.manual_seed(spec.seed)
    return build_model(spec)


def replace_norms(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, kind(child))
    return model


def half_model_with_float32_norms(spec: CellSpec, half: torch.dtype) -> nn.Module:
    model = replace_norms(plain(spec), NormInFloat32)
    for module in model.modules():
        if not isinstance(module, NormInFloat32):
            for p in module.parameters(recurse=False):
                p.data = p.data.to(half)
    return model


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and name.endswith("weight")


def gradients(model: nn.Module, half: torch.dtype, scale: float) -> Iterator[float]:
    """Run forward and backward of one step after the other; yield each loss."""
    for step in range(STEPS):
        images, labels = batch(step)
        loss = F.cross_entropy(model(images.to(half)).float(), labels)
        model.zero_grad()
        (loss * scale).backward()
        yield float(loss.detach())


def train_o2(
    spec: CellSpec, half: torch.dtype, scale: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Half model, float32 masters and momentum, gradients unscaled in float32."""
    model = half_model_with_float32_norms(spec, half)
    named = dict(model.named_parameters())
    masters = {name: p.detach().float() for name, p in named.items()}
    momenta: dict[str, Tensor] = {}
    losses = []
    for loss in gradients(model, half, scale):
        losses.append(loss)
        for name, p in named.items():
            assert p.grad is not None
            gradient = p.grad.float() / scale
            if decays(name, p):
                gradient = gradient + DECAY * masters[name]
            momenta[name] = MOMENTUM * momenta[name] + gradient if name in momenta else gradient
            masters[name] = masters[name] - RATE * momenta[name]
            p.data.copy_(masters[name])
    return losses, masters


def train_o3(spec: CellSpec, half: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Everything half: weights, gradients, momentum, norms."""
    model = replace_norms(plain(spec).to(half), NormInHalf)
    named = dict(model.named_parameters())
    momenta: dict[str, Tensor] = {}
    losses = []
    for loss in gradients(model, half, 1.0):
        losses.append(loss)
        for name, p in named.items():
            assert p.grad is not None
            gradient = torch.add(p.grad, p.data, alpha=DECAY) if decays(name, p) else p.grad.clone()
            momenta[name] = (
                momenta[name].mul_(MOMENTUM).add_(gradient) if name in momenta else gradient
            )
            p.data.add_(momenta[name], alpha=-RATE)
    return losses, {name: p.detach() for name, p in named.items()}


def train(spec: CellSpec) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, weights and masters of the cell as vitsweep trains it."""
    trainer = trainer_of(spec)
    losses = [float(trainer.step(iter([batch(step)]))) for step in range(STEPS)]
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    masters = {}
    if trainer.masters:
        pairs = zip(trainer.masters._model, trainer.masters.copies, strict=True)
        masters = {names[id(p)]: master.detach() for p, master in pairs}
    return losses, weights(trainer), masters


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_o2_trains_as_a_loop_with_masters_and_float32_norms(half: str, scale: float | None) -> None:
    spec = alone(
        "precision=O2",
        f"precision.half_dtype={half}",
        f"precision.loss_scale={scale or 'null'}",
        *SGD,
    )
    wanted_losses, wanted = train_o2(spec, HALVES[half], scale or 1.0)
    losses, found, masters = train(spec)
    assert losses == pytest.approx(wanted_losses, rel=1e-3)
    assert losses[-1] != losses[0]
    assert masters.keys() == {name for name in found if "norm" not in name}
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert found[name].dtype == HALVES[half]
        assert torch.equal(found[name], master.to(HALVES[half]))
        torch.testing.assert_close(master, wanted[name], rtol=2e-3, atol=2e-4)
    for name in found.keys() - masters.keys():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], wanted[name], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("half", HALVES)
def test_o3_trains_as_a_loop_in_which_everything_is_half(half: str) -> None:
    spec = alone("precision=O3", f"precision.half_dtype={half}", *SGD)
    wanted_losses, wanted = train_o3(spec, HALVES[half])
    losses, found, masters = train(spec)
    assert not masters
    assert losses == wanted_losses
    for name, value in found.items():
        assert value.dtype == HALVES[half]
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("half", HALVES)
def test_masters_keep_updates_that_half_weights_lose(half: str) -> None:
    """Steps smaller than a weight's last digit."""
    small = ("optimizer=sgd_loop", "optimizer.learning_rate=1e-4", "optimizer.weight_decay=0")
    o2, o3 = (alone(f"precision={o}", f"precision.half_dtype={half}", *small) for o in ("O2", "O3"))
    begin, (_, end, _) = weights(trainer_of(o3)), train(o3)
    _, _, masters = train(o2)
    assert unmoved(end, begin) > 0.2
    assert unmoved(masters, {name: value.float() for name, value in begin.items()}) < 0.02


def unmoved(after: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """ReplicaSampler of numbers that are what they were."""
    same = sum(int((value == before[name]).sum()) for name, value in after.items())
    return same / sum(value.numel() for value in after.values())


def test_adam_keeps_its_state_in_float32_except_under_o3() -> None:
    for half in HALVES:
        for level, dtype in [
            ("O0", "float32"),
            ("O1", "float32"),
            ("O2", "float32"),
            ("O3", "half"),
        ]:
            trainer = trainer_of(
                alone(f"precision={level}", f"precision.half_dtype={half}", *ADAMW)
            )
            trainer.step(iter([batch()]))
            kept = [s for s in trainer.optimizer.state.values()]
            wanted = HALVES[half] if dtype == "half" else torch.float32
            assert kept
            assert {s["exp_avg_sq"].dtype for s in kept} == {wanted}


@pytest.mark.parametrize(
    ("precision", "products", "norms"),
    [
        ("fp32", torch.float32, torch.float32),
        ("O0", torch.float32, torch.float32),
        ("O1", torch.bfloat16, torch.float32),
        ("O2", torch.bfloat16, torch.float32),
        ("O3", torch.bfloat16, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.float32),
        ("bf16_params", torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_level_computes_products_and_keeps_norms_in_its_formats(
    precision: str, products: torch.dtype, norms: torch.dtype
) -> None:
    trainer = trainer_of(alone(f"precision={precision}"))
    seen: dict[str, torch.dtype] = {}
    block = trainer.model.blocks[0]
    block.mlp.register_forward_hook(lambda _, __, output: seen.update(product=output.dtype))
    trainer.step(iter([batch()]))
    assert seen["product"] == products
    assert block.norm_mlp.weight.dtype == norms


def test_the_optimizer_gets_masters_but_norms_themselves() -> None:
    trainer = trainer_of(alone("precision=O2"))
    assert trainer.masters is not None
    assert not any(
        "norm" in n for n, p in trainer.model.named_parameters() if p.dtype != torch.float32
    )
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    norms = {id(p) for n, p in trainer.model.named_parameters() if "norm" in n}
    assert norms
    assert norms <= optimized
