"""Muon over the matrices of the blocks and AdamW behind one optimizer (needs torch)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitsweep.collectives.owners import OwnedMatrices, Parts

FUSED_QKV = (".qkv.weight", ".in_proj_weight")
"""Names of matrices (3 D, D) that are q, k and v, one below the other."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration (kellerjordan.github.io/posts/muon)."""
LEAST_NORM = 1e-7
BY_TENSOR = ("params", "names", "starts")
"""Entries of a group that have one value for each of its tensors."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is orthogonalized: a weight of a block, or one of q, k and v.

    Attributes:
        name: of the weight.
        number: which of the `of` matrices in it this is.
        of: 3 where the weight is q, k and v, else 1.
        shape: (rows, columns).
        parts: which of its numbers each rank holds; None where this rank holds all.
        begin: where this rank's numbers of it begin in what this rank holds of the weight.
    """

    name: str
    number: int
    of: int
    shape: tuple[int, ...]
    parts: Parts | None
    begin: int

    @property
    def flops(self) -> float:
        """Of an iteration: two products of the smaller side squared by the larger, one of it cubed."""
        small, large = sorted(self.shape)
        return 2.0 * small * small * (2 * large + small)

    def within(self, held: Tensor) -> Tensor:
        """Return the view of this matrix, or of this rank's numbers of it, in what this rank holds."""
        if self.parts is None:
            return held.chunk(self.of)[self.number]
        return held.view(-1).narrow(0, self.begin, self.parts.own_length)


class MuonWithAdamW(Optimizer):
    """Muon over the matrices of the blocks, AdamW over the other parameters.

    The momentum of a matrix is updated where it lies. Matrices of one shape are orthogonalized together, by
    batched products. Where ranks hold parts of matrices, each matrix is gathered on one rank that owns it, by
    cost, and what comes out is sent back to the parts (Liu et al., arXiv:2502.16982, section 2.3): one
    all-to-all each way, in bfloat16, which the iterations begin with in any case.

    Groups and state are by the parameters that are given, so that clipping, schedules and checkpoints
    treat it like any other optimizer.

    Args:
        groups: parameter groups with `names`, the reference model's, which of them lie `in_blocks`, and
            `weight_decay`; with `parts`, name -> `Parts`, where parameters are parts of tensors.
        learning_rate: of both.
        momentum: decay of the velocity of matrices.
        nesterov: look ahead.
        iterations: of Newton-Schulz, in bfloat16; for weights in float64 in float64.
        adamw: more arguments of torch.optim.AdamW.

    Attributes:
        matrix_names: of the weights that Muon updates, wherever their parts lie.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        *,
        momentum: float,
        nesterov: bool,
        iterations: int,
        adamw: dict[str, Any],
    ) -> None:
        of_muon = [*split_groups(groups, hidden=True)]
        of_adamw = [*split_groups(groups, hidden=False)]
        self._matrices = [m for group in of_muon for m in _matrices(group)]
        for group in (*of_muon, *of_adamw):
            group.pop("parts", None)  # has process groups, which nobody can save
        super().__init__([*of_muon, *of_adamw], {"lr": learning_rate})
        # AdamW shares groups and state with this optimizer.
        self._adamw = torch.optim.AdamW(of_adamw, lr=learning_rate, **adamw) if of_adamw else None
        if self._adamw:
            self._adamw.state = self.state
        self._of_muon = of_muon
        self._momentum, self._nesterov, self._iterations = momentum, nesterov, iterations
        self.matrix_names = [*dict.fromkeys(m.name for m in self._matrices)]
        parts = [m.parts for m in self._matrices if m.parts]
        self._owned = OwnedMatrices(parts, [m.flops for m in self._matrices]) if parts else None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned; both optimizers share the new groups and state."""
        super().load_state_dict(state_dict)
        of_muon = len(self._of_muon)
        self._of_muon = self.param_groups[:of_muon]
        if self._adamw:
            self._adamw.state, self._adamw.param_groups = self.state, self.param_groups[of_muon:]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = closure() if closure else None
        if self._matrices:
            self._update_matrices()
        if self._adamw:
            self._adamw.step()
        return loss

    def _update_matrices(self) -> None:
        held = {
            name: (parameter, group)
            for group in self._of_muon
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }
        ahead = {n: self._velocity(p) for n, (p, _) in held.items() if p.grad is not None}
        if self._owned:
            updates = self._exchanged(self._owned, ahead)
        else:
            own = [m for m in self._matrices if m.name in ahead]
            found = orthogonalized([m.within(ahead[m.name]) for m in own], self._iterations)
            updates = dict(zip(own, found, strict=True))
        for name in ahead:
            parameter, group = held[name]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for matrix, update in updates.items():
            if matrix.name in ahead:
                parameter, group = held[matrix.name]
                # gives an orthogonal update AdamW's size (arXiv:2502.16982, section 2.2)
                rate = group["lr"] * 0.2 * float(max(matrix.shape)) ** 0.5
                matrix.within(parameter).add_(update, alpha=-rate)

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        """Update the momentum of a parameter; return what is to be orthogonalized, in few bits."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        velocity = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        found = gradient.lerp(velocity, self._momentum) if self._nesterov else velocity
        return found.to(iterated_dtype(parameter.dtype))

    def _exchanged(
        self, owned: OwnedMatrices, ahead: Mapping[str, Tensor]
    ) -> dict[_Matrix, Tensor]:
        """Orthogonalize each matrix where it is whole; return this rank's numbers of all.

        One without a gradient goes along as zeros, since its owner may hold nothing that says so.
        """
        some = next(p for group in self.param_groups for p in group["params"])
        dtype = iterated_dtype(some.dtype)
        held = [
            m.within(ahead[m.name])
            if m.name in ahead
            else some.new_zeros(m.parts.own_length, dtype=dtype)  # type: ignore[union-attr]
            for m in self._matrices
        ]
        found = orthogonalized(owned.gather(held), self._iterations)
        return dict(zip(self._matrices, owned.scatter(found, held[0]), strict=True))


def iterated_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of Newton-Schulz iterations for weights of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalized(matrices: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Replace each matrix by one with its singular vectors, and singular values near 1.

    Matrices of one shape go together. Each gets the bits, on a CPU, that `torch.optim.Muon` gives it: it is
    divided by its norm (L2), then x <- a x + (b g + c g g) x with g = x x^T, on the smaller side.

    Args:
        matrices: (rows, columns) each, in the dtype of the iterations.
        iterations: how many.
    """
    a, b, c = COEFFICIENTS
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(matrix.shape), []).append(index)
    found: dict[int, Tensor] = {}
    for (rows, columns), indices in by_shape.items():
        x = torch.stack([matrices[i] for i in indices])
        x = x.mT if rows > columns else x  # not copied: another order of memory gives other bits
        norms = torch.stack([each.norm() for each in x]).clamp(min=LEAST_NORM)
        x = x / norms[:, None, None]
        for _ in range(iterations):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        found |= dict(zip(indices, x.mT if rows > columns else x, strict=True))
    return [found[index] for index in range(len(matrices))]


def split_groups(groups: list[dict[str, Any]], *, hidden: bool) -> Iterator[dict[str, Any]]:
    """Yield each group's parameters that are matrices of blocks, or those that are not."""
    for group in groups:
        parts: Mapping[str, Parts] = group.get("parts", {})
        shapes = {n: p.shape for n, p in zip(group["names"], group["params"], strict=True)}
        shapes |= {name: part.shape for name, part in parts.items()}
        of_muon = {
            name
            for name, shape in shapes.items()
            if len(shape) == 2 and name in group["in_blocks"] and name.endswith("weight")
        }
        chosen = [i for i, name in enumerate(group["names"]) if (name in of_muon) is hidden]
        own = {name: part for name, part in parts.items() if (name in of_muon) is hidden}
        if chosen or own:
            by_tensor = {k: [group[k][i] for i in chosen] for k in BY_TENSOR if k in group}
            yield group | by_tensor | ({"parts": own} if own else {})


def _matrices(group: Mapping[str, Any]) -> Iterator[_Matrix]:
    """Yield the matrices of a group, the same ones in the same order on every rank."""
    parts: Mapping[str, Parts] = group.get("parts", {})
    shapes = {n: tuple(p.shape) for n, p in zip(group["names"], group["params"], strict=True)}
    for name, (rows, columns) in ({n: p.shape for n, p in parts.items()} or shapes).items():
        of, begin = 3 if name.endswith(FUSED_QKV) else 1, 0
        each = parts[name].split(of) if parts else [None] * of
        for number, own in enumerate(each):
            yield _Matrix(name, number, of, (rows // of, columns), own, begin)
            begin += own.own_length if own else 0
