"""Optimizers by their defining equations, tensor by tensor: what implementations must equal."""

from collections.abc import Callable, Mapping, Set
from math import sin, sqrt
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitsweep.model.initialize import plain_name
from vitsweep.proof.reference import HALF
from vitsweep.spec.technique import OptimizerChoice
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.optimizer.muon import Muon, _PlainMuon
from vitsweep.techniques.optimizer.sgd import SGD
from vitsweep.training.update import names_in_blocks, parameter_groups

Named = dict[str, Tensor]

SERIES = 200
"""Updates of the series on which an optimizer is proved alone."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (kellerjordan.github.io/posts/muon)."""


class Update(Protocol):
    """What an optimizer does to the whole weights of a model, step after step."""

    def __call__(self, weights: Named, gradients: Named) -> Named:
        """Return the updated weights of all names that have a gradient."""


class ByEquations:
    """`SGD` (PyTorch's momentum), `AdamW` (arXiv:1711.05101, algorithm 2) and `Muon`.

    Args:
        choice: the optimizer and its settings.
        compute: dtype of the computation.
        store: dtype to which weights and state are rounded after each update.
        in_blocks: names of weights that lie in the blocks, for Muon.

    Attributes:
        state: by the names of weights.
    """

    def __init__(
        self,
        choice: OptimizerChoice,
        compute: torch.dtype,
        store: torch.dtype | None = None,
        in_blocks: Set[str] = frozenset(),
    ) -> None:
        self._plain: Any = choice.plain()
        self._update, self._in_blocks = EQUATIONS[type(self._plain)], in_blocks
        self._compute, self._store = compute, store or compute
        self.state: dict[str, dict[str, Any]] = {}

    def __call__(self, weights: Named, gradients: Named) -> Named:
        """Update in the order of the names."""
        return {n: self._updated(n, weights[n], g) for n, g in gradients.items() if n in weights}

    def _updated(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        # A complex number is two real ones here, as in torch's optimizers, and is never in half precision.
        pair = weight, gradient.reshape(weight.shape)
        w, g = (_real(tensor).to(self._compute) for tensor in pair)
        store = self._compute if weight.is_complex() else self._store
        state = self.state.setdefault(name, {"step": 0})
        state["step"] += 1
        decay = self._plain.weight_decay if decays(name, weight) else 0.0
        update = _adamw if self._update is _muon and name not in self._in_blocks else self._update
        updated = update(self._plain, state, name, w, g, decay)
        for key in state.keys() - {"step"}:
            state[key] = state[key].to(store).to(self._compute)
        return torch.view_as_complex(updated) if weight.is_complex() else updated.to(store)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def decays(name: str, weight: Tensor) -> bool:
    """Whether weight decay applies: to matrices, filters and other tensors called `weight`, not to norms."""
    return weight.ndim > 1 and name.endswith("weight")


class PlainImplementation:
    """What `plain` of a choice builds, over copies of the weights in their own dtype."""

    def __init__(self, choice: OptimizerChoice, in_blocks: Set[str]) -> None:
        self._choice, self._in_blocks = choice.plain(), in_blocks
        self._optimizer: Optimizer | None = None
        self._copies: dict[str, nn.Parameter] = {}

    def __call__(self, weights: Named, gradients: Named) -> Named:
        """Update those that have a gradient."""
        if self._optimizer is None:
            self._copies = {n: nn.Parameter(weights[n].clone()) for n in gradients}
            groups = []
            for decay in (True, False):
                names = [n for n in gradients if decays(n, weights[n]) is decay]
                held: dict[str, Any] = {"params": [self._copies[n] for n in names], "names": names}
                held["in_blocks"] = self._in_blocks & set(names)
                groups += [held | {"weight_decay": decay * self._choice.weight_decay}] * bool(names)
            self._optimizer = self._choice.build(groups)
        for name, copy in self._copies.items():
            found = gradients.get(name)
            copy.data.copy_(weights[name])
            copy.grad = None if found is None else found.reshape(copy.shape).to(copy.dtype).clone()
        self._optimizer.step()
        return {name: copy.detach().clone() for name, copy in self._copies.items()}


def is_elementwise(choice: OptimizerChoice) -> bool:
    """Whether equations of every number alone define the optimizer."""
    return type(choice.plain()) in EQUATIONS and not isinstance(choice, Muon)


def definitions_of(choice: OptimizerChoice, stored: torch.dtype, inside: Set[str]) -> list[Update]:
    """Return the optimizer's equations; where these are unknown or rounded, its reference implementation.

    Args:
        choice: the optimizer and its settings.
        stored: dtype of the weights that it updates.
        inside: names of weights that lie in the blocks, for Muon.
    """
    is_exact_muon = isinstance(choice, Muon) and stored == torch.float64
    if not (is_elementwise(choice) or is_exact_muon):  # which torch's iterates in few bits
        return [PlainImplementation(choice, inside)]
    if stored in HALF:
        return [ByEquations(choice, torch.float32, stored), PlainImplementation(choice, inside)]
    return [ByEquations(choice, torch.float64, in_blocks=inside)]


def series_apart(model: nn.Module, choice: OptimizerChoice, steps: int = SERIES) -> str:
    """Train a few tensors of a reference model on prescribed gradients; say what leaves the definition.

    The gradients of the steps change their scale over four decades and their signs, and vanish in
    some steps. Weights, state and step counts are compared at the end, in float32.
    Four steps would hardly show another beta2.

    Args:
        model: the reference; it is trained.
        choice: gives the optimizer and its definition.
        steps: number of updates.

    Returns:
        What differs by how much; "" where nothing does.
    """
    named = _few(model)
    optimizer = choice.build(parameter_groups(model, choice.weight_decay))
    first = {n: p.detach().clone() for n, p in named.items()}
    inside, known = names_in_blocks(model), type(choice.plain()) in EQUATIONS
    equations = ByEquations(choice, torch.float64, in_blocks=inside) if known else None
    update = equations or PlainImplementation(choice, inside)
    wanted = dict(first)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        scale = 0.0 if step % 17 == 5 else 10.0 ** (2 * sin(step / 7) - 2)
        drawn = {
            n: torch.randn(p.shape, dtype=p.dtype, generator=generator) for n, p in named.items()
        }
        gradients = {n: (scale * g).to(first[n].device) for n, g in drawn.items()}
        for name, parameter in named.items():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradients[name])
        optimizer.step()
        wanted = update(wanted, gradients)
    allowed = max(1e-3, 15 * choice.relative_tolerance())
    for name, parameter in named.items():
        found, moved = parameter.detach() - first[name], wanted[name] - first[name]
        rounding = steps**0.5 * 2.0**-22 * first[name].norm()
        text = _told(f"weight `{name}`", found, moved, steps, allowed, float(rounding))
        if text or equations is None:
            return text
        held, defined = optimizer.state.get(parameter, {}), equations.state[name]
        for key in held.keys() & defined.keys():
            what = f"state `{key}` of `{name}`"
            if text := _told(what, torch.as_tensor(held[key]), defined[key], steps, allowed):
                return text
    return ""


def _told(
    what: str, found: Tensor, wanted: Any, steps: int, allowed: float, rounding: float = 0.0
) -> str:
    found, wanted = (_real(torch.as_tensor(t)).double().to(found.device) for t in (found, wanted))
    apart, size = float((found - wanted).norm()), float(wanted.norm())
    if apart <= allowed * size + rounding:
        return ""
    return (
        f"{what} differs from the optimizer's definition by {apart / (size or 1):.3g} of its norm (L2) after "
        f"{steps} updates, where rounding explains {allowed:g} at most,"
    )


def _few(model: nn.Module) -> Named:
    """Freeze all of a model but its largest matrix, the last ones in and after blocks, and a vector."""
    named = {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [n for n, p in named.items() if p.ndim == 2]
    largest = sorted(matrices, key=lambda n: named[n].numel())
    vectors = [n for n, p in named.items() if p.ndim == 1]
    inside = [n for n in matrices if n in names_in_blocks(model)]
    chosen = {*largest[-1:], *matrices[-1:], *inside[-1:], *vectors[-1:]} or set(named)
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    return {n: p for n, p in named.items() if n in chosen}


def _adamw(
    o: AdamW, state: dict[str, Any], name: str, w: Tensor, g: Tensor, decay: float
) -> Tensor:
    m = o.beta1 * state.get("exp_avg", 0) + (1 - o.beta1) * g
    v = o.beta2 * state.get("exp_avg_sq", 0) + (1 - o.beta2) * g * g
    state["exp_avg"], state["exp_avg_sq"] = m, v
    m_hat, v_hat = m / (1 - o.beta1 ** state["step"]), v / (1 - o.beta2 ** state["step"])
    return (1 - o.learning_rate * decay) * w - o.learning_rate * m_hat / (v_hat.sqrt() + o.eps)


def _sgd(o: SGD, state: dict[str, Any], name: str, w: Tensor, g: Tensor, decay: float) -> Tensor:
    g = g + decay * w
    if o.momentum:
        before = state.get("momentum_buffer")
        state["momentum_buffer"] = g if before is None else o.momentum * before + g
        g = g + o.momentum * state["momentum_buffer"] if o.nesterov else state["momentum_buffer"]
    return w - o.learning_rate * g


def _muon(o: Muon, state: dict[str, Any], name: str, w: Tensor, g: Tensor, decay: float) -> Tensor:
    if not (w.ndim == 2 and name.endswith("weight")):
        return _adamw(o, state, name, w, g, decay)  # type: ignore[arg-type]
    m = o.momentum * state.get("momentum_buffer", 0) + (1 - o.momentum) * g
    state["momentum_buffer"] = m
    ahead = (1 - o.momentum) * g + o.momentum * m if o.nesterov else m
    parts = ahead.chunk(3 if name.endswith((".qkv.weight", ".in_proj_weight")) else 1)
    update = torch.cat([_orthogonal(part, o.iterations) * _size(part) for part in parts])
    return (1 - o.learning_rate * decay) * w - o.learning_rate * update


def _orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _size(matrix: Tensor) -> float:
    """The factor that gives the update the root mean square of AdamW's, 0.2."""
    return 0.2 * sqrt(max(matrix.shape))


EQUATIONS: Mapping[type, Callable[..., Tensor]] = {
    AdamW: _adamw,
    SGD: _sgd,
    _PlainMuon: _muon,
}
