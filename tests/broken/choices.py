"""Choices that are wrong, as somebody might write them; `conf/` beside this file names them.

Each fault is a function of this module. `IN_ANY_PRECISION` act under all, `IN_HALF_ALONE` where a
number format below float32 is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vitsweep.spec.technique import Memory, OptimizerChoice, PrecisionPlan
from vitsweep.techniques.memory.recompute import RecomputeBlocks
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.sequence_parallel.lss import LongSequenceSegmentation
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.techniques.sharding.zero1 import Zero1

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from vitsweep.model.attention import Attend
    from vitsweep.world import World


def _is_half(tensor: "Tensor") -> bool:
    return tensor.dtype.itemsize < 4


# Faults of the model: function of the model.


def gradients_times(model: "nn.Module", factor: float, part: str = "") -> None:
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.register_hook(lambda gradient: factor * gradient)


gradients_doubled = partial(gradients_times, factor=2.0)
gradients_halved = partial(gradients_times, factor=0.5)
gradients_x_1_05 = partial(gradients_times, factor=1.05)
one_bias_gradient_x_1_02 = partial(gradients_times, factor=1.02, part="blocks.0.mlp.up.bias")
one_gradient_negated = partial(gradients_times, factor=-1.0, part="blocks.1.mlp.up.weight")
one_bias_without_gradient = partial(gradients_times, factor=0.0, part="blocks.0.attention.out.bias")
class_token_without_gradient = partial(gradients_times, factor=0.0, part="class_token")


def attending(model: "nn.Module", wrong: "Callable[[Attend], Attend]") -> None:
    """Put something around the attention of every block."""
    from vitsweep.model.attention import Attention

    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = wrong(module.attend)


def attention(wrong: "Callable[[Attend, Tensor, Tensor, Tensor], Tensor]") -> Any:
    """A fault from (right attend, q, k, v)."""

    def fault(model: "nn.Module") -> None:
        attending(model, lambda right: partial(wrong, right))

    return fault


@attention
def scale_missing(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    return right(q * q.shape[-1] ** 0.5, k, v)


@attention
def scores_x_1_03(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    return right(q * 1.03, k, v)


@attention
def causal_mask(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=True)


@attention
def heads_swapped(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    return right(q, k, v).flip(1)


@attention
def forgets_above_32_tokens(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    return right(q, k[:, :, :32], v[:, :, :32])


@attention
def attends_to_padding(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    from torch.nn.functional import pad

    return right(q, pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)))


def keys_of_the_batch_before(model: "nn.Module") -> None:
    """As where a message is read before it has arrived."""

    def wrong(right: "Attend") -> "Attend":
        kept: list[tuple[Tensor, Tensor]] = []

        def stale(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            before = kept.pop() if kept else (k, v)
            kept.append((k.detach(), v.detach()))
            return right(q, *before)

        return stale

    attending(model, wrong)


def outputs(
    model: Any, kind: Callable[[str, Any], bool], change: Callable[[Any, Any], Any]
) -> None:
    """Change the outputs of some modules: (inputs, output) -> output."""
    for name, module in model.named_modules():
        if kind(name, module):
            module.register_forward_hook(lambda m, i, output: change(i[0], output))


def _linear(name: str, module: Any) -> bool:
    return type(module).__name__ == "Linear"


def _named(end: str) -> Callable[[str, Any], bool]:
    return lambda name, module: name.endswith(end)


def weights_x_1_01(model: "nn.Module") -> None:
    outputs(model, _linear, lambda x, y: 1.01 * y)


def branch_without_gradient(model: "nn.Module") -> None:
    outputs(model, _named("blocks.0.mlp"), lambda x, y: y.detach())


def third_block_x_0_9(model: "nn.Module") -> None:
    outputs(model, _named("blocks.2.mlp"), lambda x, y: 0.9 * y)


def half_of_the_images_without_norm(model: "nn.Module") -> None:
    import torch

    def wrong(x: Any, y: Any) -> Any:
        half = len(y) // 2
        return torch.cat([y[:half], x[half:].to(y.dtype)])

    outputs(model, _named("blocks.1.norm_mlp"), wrong)


def tokens_shifted(model: "nn.Module") -> None:
    outputs(model, _named("embedding"), lambda x, y: y.roll(1, 1))


def images_above_the_eighth_are_dropped(model: "nn.Module") -> None:
    """The twin has four images; the cell trains on the first eight alone."""
    import torch

    def wrong(x: Any, y: Any) -> Any:
        first = y[:8]
        return torch.cat([first, first.flip(0).repeat(-(-len(y) // 8), 1)])[: len(y)]

    outputs(model, _named("head"), wrong)


def fourth_block_gradients_x_1_01(model: "nn.Module") -> None:
    """The twin has three blocks."""
    outputs(model, _named("blocks.3.mlp"), lambda x, y: y + 0.01 * (y - y.detach()))


def norms_sum_gradients_of_1024_rows(model: "nn.Module") -> None:
    import torch

    def rows(x: Any, norm: Any, end: int, *weights: Any) -> Any:
        first = torch.layer_norm(x[:end], norm.normalized_shape, *weights, norm.eps)
        if len(x) <= end:
            return first
        rest = (weight.detach() for weight in weights)
        return torch.cat([first, torch.layer_norm(x[end:], norm.normalized_shape, *rest, norm.eps)])

    def around(norm: Any) -> Callable[[Any], Any]:
        return lambda x: rows(x.flatten(0, -2), norm, 1024, norm.weight, norm.bias).view_as(x)

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            vars(module)["forward"] = around(module)


def keys_not_rescaled(tile: int) -> Callable[[Any], None]:
    """As an online softmax whose sums over the first tile of keys keep the maximum of these alone."""

    @attention
    def fault(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        import torch

        if k.shape[2] <= tile:
            return right(q, k, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        first, rest = scores[..., :tile], scores[..., tile:]
        rest = rest - scores.amax(-1, keepdim=True)
        weights = torch.cat([first - first.amax(-1, keepdim=True), rest], -1).exp()
        return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v

    return fault


keys_after_the_64th_not_rescaled = keys_not_rescaled(64)
keys_after_the_128th_not_rescaled = keys_not_rescaled(128)


def norms_eps_1e_5(model: "nn.Module") -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps *= 10


def gelu_by_tanh(model: "nn.Module") -> None:
    """As a fused kernel may approximate it."""
    _gelu(model, lambda x: True)


def _gelu(model: "nn.Module", where: "Callable[[Tensor], bool]") -> None:
    from torch.nn import functional

    right = functional.gelu

    def gelu(x: "Tensor") -> "Tensor":
        return right(x, approximate="tanh" if where(x) else "none")

    for module in model.modules():
        if type(module).__name__ == "Mlp":

            def forward(x: "Tensor", mlp: Any = module) -> Any:
                return mlp.down(gelu(mlp.up(x)))

            module.forward = forward  # type: ignore[method-assign]


def last_position_of_the_token_before(model: Any) -> None:
    import torch

    def wrong(x: Any, y: Any) -> Any:
        position = model.embedding.position.to(y.dtype)
        moved = torch.zeros_like(y)
        moved[:, -1] = position[-2] - position[-1]
        return y + moved

    outputs(model, _named("embedding"), wrong)


def gradients_lost_from_the_second_step(model: Any) -> None:
    """As a bucket that is sent before its last gradient is there."""
    seen = [0]

    def wrong(gradient: "Tensor") -> "Tensor":
        seen[0] += 1
        return gradient if seen[0] == 1 else 0 * gradient

    model.blocks[0].mlp.up.weight.register_hook(wrong)


def images_of_the_third_step_ever_after(model: "nn.Module") -> None:
    """As a replayed step whose inputs are no longer copied to where it reads."""
    kept: list[Tensor] = []

    def wrong(module: Any, inputs: Any) -> Any:
        if len(kept) < 3:
            kept.append(inputs[0].clone())
        return (kept[-1].to(inputs[0].dtype), *inputs[1:])

    model.register_forward_pre_hook(wrong)


def last_micro_batch_alone(model: "nn.Module") -> None:
    """Gradients are overwritten where they were to be added."""

    def wrong(module: Any, inputs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    model.register_forward_pre_hook(wrong)


# Faults of the path from gradients to weights; each rank is a process of its own.


def each_tensor_clipped_by_itself(model: "nn.Module") -> None:
    from torch.nn.utils import clip_grad_norm_

    from vitsweep.training.trainer import Trainer

    def wrong(trainer: Any) -> None:
        for parameter in _parameters(trainer.optimizer):
            clip_grad_norm_([parameter], trainer.cell.optimizer.clip_norm)

    Trainer._clip = wrong  # type: ignore[method-assign]


def nothing_clipped(model: "nn.Module") -> None:
    from vitsweep.training.trainer import Trainer

    Trainer._clip = lambda trainer: None  # type: ignore[assignment, method-assign]


def clipped_by_the_norm_of_one_rank(model: "nn.Module") -> None:
    from torch.nn.utils import clip_grad_norm_

    from vitsweep.training.trainer import Trainer

    def wrong(trainer: Any) -> None:
        clip_grad_norm_(_parameters(trainer.optimizer), trainer.cell.optimizer.clip_norm)

    Trainer._clip = wrong  # type: ignore[method-assign]


def _around(kind: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a method: `wrong(right, self, ...)`, once per process."""
    right = getattr(kind, name)
    if not hasattr(right, "is_broken"):

        def method(*arguments: Any) -> Any:
            return wrong(right, *arguments)

        method.is_broken = True  # type: ignore[attr-defined]
        setattr(kind, name, method)


def _masters(name: str, wrong: Callable[..., Any]) -> Callable[[Any], None]:
    def fault(model: Any) -> None:
        from vitsweep.training.update import MasterWeights

        _around(MasterWeights, name, wrong)

    return fault


def _rounded(publish: Any, masters: Any) -> None:
    publish(masters)
    for own, master in zip(masters._model, masters.copies, strict=True):
        master.data.copy_(own.data)


def _truncated(publish: Any, masters: Any) -> None:
    import torch

    publish(masters)
    for own, master in zip(masters._model, masters.copies, strict=True):
        above = own.detach().float().abs() > master.detach().abs()
        toward_zero = torch.nextafter(own.detach(), torch.zeros_like(own))
        own.data.copy_(torch.where(above, toward_zero, own.detach()))


def _from_before(publish: Any, masters: Any) -> None:
    """The weights that are published are those before the update."""
    now = [m.detach().clone() for m in masters.copies]
    before = vars(masters).get("before", now)
    vars(masters)["before"] = now
    for own, earlier in zip(masters._model, before, strict=True):
        own.data.copy_(earlier)


def _on_rank_0(publish: Any, masters: Any) -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        publish(masters)


def _first_alone(take: Any, masters: Any) -> None:
    kept = vars(masters).setdefault("kept", [])
    if not kept:
        take(masters)
        kept.extend(m.grad.clone() for m in masters.copies)
    for master, gradient in zip(masters.copies, kept, strict=True):
        master.grad = gradient.clone()


def _coarse(take: Any, masters: Any) -> None:
    import torch

    take(masters)
    for master in masters.copies:
        master.grad = master.grad.to(torch.float8_e4m3fn).float()


def _one_skipped(take: Any, masters: Any) -> None:
    take(masters)
    masters.copies[-1].grad.zero_()


masters_in_half = _masters("publish", _rounded)
masters_truncated = _masters("publish", _truncated)
masters_published_a_step_late = _masters("publish", _from_before)
masters_never_published = _masters("publish", lambda publish, masters: None)
masters_published_on_rank_0 = _masters("publish", _on_rank_0)
masters_gradients_of_the_first_step = _masters("take_gradients", _first_alone)
masters_gradients_in_three_bits = _masters("take_gradients", _coarse)
masters_one_gradient_lost = _masters("take_gradients", _one_skipped)


def _gradients_after_unscaling(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def fault(model: Any) -> None:
        from vitsweep.training.update import LossScaler

        def wrong(unscale: Any, scaler: Any, optimizer: Any) -> Any:
            found = unscale(scaler, optimizer)
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    change(parameter.grad)
            return found

        _around(LossScaler, "unscale", wrong)

    return fault


unscaling_lost = _gradients_after_unscaling(lambda gradient: gradient.mul_(2.0**16))
unscaled_by_half_the_scale = _gradients_after_unscaling(lambda gradient: gradient.mul_(2))
unscaled_in_half = _gradients_after_unscaling(
    lambda gradient: gradient.copy_((gradient * 2**-4).half().float() * 2**4)
)


def overflow_on_one_rank_alone(model: "nn.Module") -> None:
    """Rank 1 finds an overflow after the first step and keeps it to itself."""
    import torch.distributed as dist

    from vitsweep.training.update import LossScaler

    def wrong(unscale: Any, scaler: Any, optimizer: Any) -> Any:
        found = unscale(scaler, optimizer)
        count = vars(scaler)["count"] = vars(scaler).get("count", 0) + 1
        if count > 1 and not found and dist.is_initialized() and dist.get_rank() == 1:
            state = scaler._scaler._per_optimizer_states[id(optimizer)]
            for flag in state["found_inf_per_device"].values():
                flag.fill_(1.0)
        return found

    _around(LossScaler, "unscale", wrong)


def clipped_before_unscaling(model: "nn.Module") -> None:
    from vitsweep.training.trainer import Trainer

    def wrong(clip: Any, trainer: Any) -> None:
        if trainer.scaler:
            for parameter in _parameters(trainer.optimizer):
                parameter.grad.mul_(1024)
        clip(trainer)

    _around(Trainer, "_clip", wrong)


# Faults where tensors are in half precision.


@attention
def half_scores_x_1_03(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    return right(q * 1.03 if _is_half(q) else q, k, v)


@attention
def half_causal(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=True) if _is_half(q) else right(q, k, v)


@attention
def half_last_key_missed(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    """As a kernel whose tiles leave out the rest."""
    return right(q, k[:, :, :-1], v[:, :, :-1]) if _is_half(q) else right(q, k, v)


def _where_half(kind: Callable[[str, Any], bool], change: Callable[[Any], Any]) -> Any:
    def fault(model: Any) -> None:
        outputs(model, kind, lambda x, y: change(y) if _is_half(y) else y)

    return fault


half_weights_x_1_01 = _where_half(_linear, lambda y: 1.01 * y)
half_third_block_x_0_9 = _where_half(_named("blocks.2.mlp.down"), lambda y: 0.9 * y)
half_logits_in_three_bits = _where_half(
    _named("head"), lambda y: y + (_in_three_bits(y) - y).detach()
)
half_branch_without_gradient = _where_half(_named("blocks.0.mlp.down"), lambda y: y.detach())
half_clamped = _where_half(_linear, lambda y: y.clamp(-1, 1))


def _in_three_bits(y: Any) -> Any:
    import torch

    return y.to(torch.float8_e4m3fn).to(y.dtype)


def half_gelu_by_tanh(model: "nn.Module") -> None:
    _gelu(model, _is_half)


@attention
def half_scores_rounded(right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    """Scores are stored in half precision before the softmax, as `nn.MultiheadAttention` does."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(v.dtype) @ v if _is_half(q) else right(q, k, v)


@attention
def half_exponentials_by_a_cubic(
    right: "Attend", q: "Tensor", k: "Tensor", v: "Tensor"
) -> "Tensor":
    """2^x by a polynomial of its fraction, 1e-4 off, as FlashAttention 4 spares the unit for exponentials."""
    if not _is_half(q):
        return right(q, k, v)
    x = (q.float() @ k.float().mT) * (1.4426950408889634 * q.shape[-1] ** -0.5)
    x = x - x.amax(-1, keepdim=True).detach()
    f = x - x.detach().floor()
    power = 1 + f * (0.69514614 + f * (0.22764469 + f * 0.07711909))
    weights = power * x.detach().floor().exp2()
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


def half_loss_of_half_of_the_images(model: "nn.Module") -> None:
    """Logarithms of the softmax are rounded to half precision for every other image."""
    import torch

    def wrong(y: Any) -> Any:
        is_even = torch.arange(len(y))[:, None] % 2 == 0
        with torch.autocast(y.device.type, enabled=False):
            return torch.where(is_even, y.log_softmax(-1), y)

    _where_half(_named("head"), wrong)(model)


def half_variance_in_one_pass(model: "nn.Module") -> None:
    """Mean of squares less square of mean, in the dtype of the input."""
    import torch

    def around(norm: Any) -> Any:
        right = norm.forward

        def forward(x: "Tensor") -> Any:
            if not _is_half(x):
                return right(x)
            with torch.autocast(x.device.type, enabled=False):
                mean = x.mean(-1, keepdim=True)
                variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp_min(0)
                normed = (x - mean) * (variance.float() + norm.eps).rsqrt().to(x.dtype)
                return normed * norm.weight.to(x.dtype) + norm.bias.to(x.dtype)

        return forward

    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            vars(module)["forward"] = around(module)


def half_gradients(change: "Callable[[Tensor], Tensor]") -> Callable[[Any], None]:
    """Change gradients of parameters in steps whose linears compute in half precision."""

    def fault(model: Any) -> None:
        acting: list[bool] = []

        def note(x: Any, y: Any) -> Any:
            acting[:] = [_is_half(y)]
            return y

        outputs(model, _named("blocks.0.mlp.up"), note)
        for parameter in model.parameters():
            parameter.register_hook(lambda g: change(g) if acting == [True] else g)

    return fault


half_gradients_x_1_05 = half_gradients(lambda g: 1.05 * g)
half_gradients_below_1e_3_flushed = half_gradients(lambda g: g.where(g.abs() > 1e-3, 0 * g))
half_bias_gradients_x_0_9 = half_gradients(lambda g: 0.9 * g if g.ndim == 1 else g)


@dataclass(frozen=True, kw_only=True)
class BrokenMemory(Memory):
    """Changes the model, or what trains it, and keeps all activations."""

    fault: str

    def apply(self, model: "nn.Module") -> "nn.Module":
        globals()[self.fault](model)
        return model


@dataclass(frozen=True, kw_only=True)
class BrokenRecompute(RecomputeBlocks):
    """The repetition of a block has another eps in its norms."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        import torch

        for module in model.modules():
            if hasattr(module, "eps"):

                def enter(m: Any, inputs: Any, right: float = module.eps) -> None:
                    repeats = torch._C._current_graph_task_id() != -1
                    m.eps = 1e-3 if repeats else right

                module.register_forward_pre_hook(enter)
        return super().apply(model)


# Faults of the optimizer: function of it.


def _parameters(optimizer: "Optimizer") -> "list[Tensor]":
    return [p for group in optimizer.param_groups for p in group["params"]]


def _setting(**values: object) -> "Callable[[Optimizer], None]":
    def fault(optimizer: "Optimizer") -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return fault


def _before(change: "Callable[[Optimizer], object]") -> "Callable[[Optimizer], object]":
    return lambda optimizer: optimizer.register_step_pre_hook(lambda o, a, k: change(o))  # type: ignore[return-value]


def _after(change: "Callable[[Optimizer], object]") -> "Callable[[Optimizer], object]":
    return lambda optimizer: optimizer.register_step_post_hook(lambda o, a, k: change(o))  # type: ignore[return-value]


learning_rate_doubled = _setting(lr=2e-3)
beta1_of_0_8 = _setting(betas=(0.8, 0.999))
beta2_of_0_9 = _setting(betas=(0.9, 0.9))
beta2_of_0_99 = _setting(betas=(0.9, 0.99))
eps_of_1e_4 = _setting(eps=1e-4)
no_weight_decay = _setting(weight_decay=0.0)
decay_of_everything = _setting(weight_decay=0.05)
largest_mean_square_kept = _setting(amsgrad=True)


@_before
def never_updates(optimizer: "Optimizer") -> None:
    for parameter in _parameters(optimizer):
        parameter.grad = None


@_before
def half_of_the_tensors_skipped(optimizer: "Optimizer") -> None:
    for parameter in _parameters(optimizer)[::2]:
        parameter.grad = None


@_before
def numbers_after_32768_are_left(optimizer: "Optimizer") -> None:
    """As a kernel that handles the first chunk of each tensor."""
    for parameter in _parameters(optimizer):
        if parameter.grad is not None and parameter.numel() > 32768:
            parameter.grad.view(-1)[32768:] = 0


@_before
def no_bias_correction(optimizer: "Optimizer") -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1e6)


@_before
def signs_alone(optimizer: "Optimizer") -> None:
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad.sign_()


@_before
def steps_counted_twice(optimizer: "Optimizer") -> None:
    for state in optimizer.state.values():
        state["step"] += 1


@_before
def decay_through_the_gradient(optimizer: "Optimizer") -> None:
    """Adam with L2, as before AdamW."""
    for group in optimizer.param_groups:
        decay = group.setdefault("coupled", group["weight_decay"])
        group["weight_decay"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=decay)


def biases_learn_half_as_fast(optimizer: "Optimizer") -> None:
    for group in optimizer.param_groups:
        if group["weight_decay"] == 0:
            group["lr"] /= 2


@_after
def first_weight_grows(optimizer: "Optimizer") -> None:
    _parameters(optimizer)[0].data.mul_(1.01)


@_after
def state_is_lost(optimizer: "Optimizer") -> None:
    optimizer.state.clear()


@_after
def mean_square_is_lost(optimizer: "Optimizer") -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


@_after
def momentum_lost_after_the_tenth_step(optimizer: "Optimizer") -> None:
    for state in optimizer.state.values():
        if float(state["step"]) % 10 == 0:
            state["exp_avg"].zero_()


def zeros_are_skipped(optimizer: "Optimizer") -> None:
    """Numbers whose gradient is zero keep their weight, as a sparse Adam's do."""
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def before(o: Any, a: Any, k: Any) -> None:
        kept[:] = [
            (p, p.detach().clone(), p.grad == 0) for p in _parameters(o) if p.grad is not None
        ]

    def after(o: Any, a: Any, k: Any) -> None:
        for parameter, earlier, at in kept:
            parameter.data.copy_(earlier.where(at, parameter.detach()))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@dataclass(frozen=True, kw_only=True)
class BrokenOptimizer(OptimizerChoice):
    """A mistake in the optimizer of the class that follows."""

    fault: str

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        optimizer = super().build(groups)
        globals()[self.fault](optimizer)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class BrokenAdamW(BrokenOptimizer, AdamW):
    """AdamW with a mistake in its optimizer."""


# Faults between ranks.


@dataclass(frozen=True, kw_only=True)
class BrokenDdp(Ddp):
    """DDP whose exchange is wrong."""

    fault: str

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        if self.fault == "no_exchange":
            return model
        wrapped = super().apply(model, plan, world)
        if self.fault == "rank_1_begins_elsewhere":
            if world.rank == 1:
                model.head.weight.data.mul_(1.001)
        else:
            hook = globals()[self.fault]
            wrapped.register_comm_hook(plan, lambda plan, bucket: hook(plan, bucket))
        return wrapped

    def gradient_sync(self, model: Any, is_last_micro_batch: bool) -> Any:
        from contextlib import nullcontext

        none = self.fault == "no_exchange"
        return nullcontext() if none else super().gradient_sync(model, is_last_micro_batch)


def _mean(bucket: Any, change: "Callable[[Tensor], Tensor]", ranks: int = 2) -> Any:
    import torch.distributed as dist

    sent = change(bucket.buffer()) / ranks
    work: Any = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: bucket.buffer().copy_(sent))


def summed_for_averaged(plan: Any, bucket: Any) -> Any:
    return _mean(bucket, lambda g: g, ranks=1)


def first_bucket_alone(plan: Any, bucket: Any) -> Any:
    """Averages the bucket that arrives first; the ranks keep their own gradients of the others."""
    import torch

    if bucket.index() == 0:
        return _mean(bucket, lambda g: g.clone())
    kept: torch.futures.Future[Tensor] = torch.futures.Future()
    kept.set_result(bucket.buffer())
    return kept


def exchanged_in_three_bits_if_half(plan: Any, bucket: Any) -> Any:
    import torch

    half = plan.autocast_dtype or (plan.param_dtype != "float32" and plan.param_dtype != "float64")
    return _mean(
        bucket, lambda g: g.float().to(torch.float8_e4m3fn).to(g.dtype) if half else g.clone()
    )


def reduced_in_bfloat16_if_half(plan: Any, bucket: Any) -> Any:
    half = plan.autocast_dtype or plan.param_dtype in ("float16", "bfloat16")
    return _mean(bucket, lambda g: g.bfloat16() if half else g.clone())


def last_gradient_before_it_arrived(plan: Any, bucket: Any) -> Any:
    """The last tensor of a bucket is exchanged as it was in the step before."""
    import torch
    import torch.distributed as dist

    kept = globals().setdefault("_kept", {})
    last = bucket.gradients()[-1]
    length = last.numel()
    earlier = kept.get(bucket.index())
    kept[bucket.index()] = bucket.buffer()[-length:].clone()
    if earlier is None or earlier.shape != kept[bucket.index()].shape:
        earlier = torch.zeros_like(kept[bucket.index()])
    if dist.get_rank() == 1:
        bucket.buffer()[-length:] = earlier.to(bucket.buffer().dtype)
    return _mean(bucket, lambda g: g.clone())


def rank_1_keeps_its_own(plan: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    own = bucket.buffer().clone()
    future = _mean(bucket, lambda g: g.clone())
    return future.then(lambda f: own if dist.get_rank() == 1 else f.value())


def rank_1_without_update(plan: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    future = _mean(bucket, lambda g: g.clone())
    return future.then(lambda f: 0 * f.value() if dist.get_rank() == 1 else f.value())


@dataclass(frozen=True, kw_only=True)
class BrokenZero1(Zero1):
    """ZeRO-1 whose parts are wrong."""

    fault: str

    def optimizer_groups(self, groups: Any, model: Any) -> Any:
        held = super().optimizer_groups(groups, model)
        if self.fault == "last_piece_of_a_rank_not_updated":
            for key in ("params", "names", "starts"):
                held[-1][key] = held[-1][key][:-1]
        return held

    def complete_update(self, model: Any) -> None:
        if self.fault == "parameters_gathered_every_other_time":
            count = vars(model)["count"] = vars(model).get("count", 0) + 1
            if count % 2 == 0:
                for replica in (m for m in model.modules() if hasattr(m, "buckets")):
                    for parameter in replica.parameters():
                        parameter.grad = None
                return
        super().complete_update(model)


@dataclass(frozen=True, kw_only=True)
class BrokenLss(LongSequenceSegmentation):
    """Attends to the tokens that pad the last rank's share."""

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        from vitsweep.model.block import stacks_of
        from vitsweep.techniques.sequence_parallel.token_sharding import (
            replace_attend,
            shard_tokens,
        )
        from vitsweep.techniques.sequence_parallel.wrapped_attention import to_all_keys

        [stack], group = stacks_of(model), world.token_group()
        along = stack.axes[0]
        padded = -(-along.length // group.size()) * group.size()
        shard_tokens(stack, along, along, group)
        replace_attend(stack, lambda attend, length: to_all_keys(attend, padded, group))
        return model


def nothing(broken: object) -> None:
    """The control: it is proved."""
