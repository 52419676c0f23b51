"""Linears split over ranks, by columns and by rows (Megatron-LM, arXiv:1909.08053, section 3)."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.megatron_operators import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    sum_gradients,
)
from vitsweep.collectives.padding import check_share, pad


@dataclass(frozen=True)
class Replicated:
    """Every rank of the group has all tokens outside the split matrices."""

    group: ProcessGroup

    def enter(self, x: Tensor) -> Tensor:
        """Hand all tokens to the split matrices; backward sums over the ranks."""
        return copy_to_tensor_parallel(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum partial products of all tokens."""
        return reduce_from_tensor_parallel(x, self.group)

    def parameter(self, parameter: Tensor) -> Tensor:
        """Return a whole parameter used outside: its gradient is complete on every rank."""
        return parameter


@dataclass(frozen=True)
class TokenSharded:
    """Every rank has its own tokens outside the split matrices (arXiv:2205.05198, section 4.2).

    Attributes:
        group: ranks of the split.
        axis: of the tokens.
        length: tokens over all ranks without padding; None keeps what padding there is.
    """

    group: ProcessGroup
    axis: int
    length: int | None

    def enter(self, x: Tensor) -> Tensor:
        """Gather the tokens; padding stays outside."""
        if self.length is not None:
            check_share(x, self.axis, self.length, self.group)
        whole = gather_from_sequence_parallel(x, self.axis, self.group)
        return whole if self.length is None else whole.narrow(self.axis, 0, self.length)

    def leave(self, x: Tensor) -> Tensor:
        """Sum partial products and keep own tokens."""
        padded = pad(x, self.axis, self.group.size())
        return reduce_scatter_to_sequence_parallel(padded, self.axis, self.group)

    def parameter(self, parameter: Tensor) -> Tensor:
        """Return a whole parameter used on own tokens: its gradient is summed over the ranks."""
        return sum_gradients(parameter, self.group)


Boundary = Replicated | TokenSharded


class SplitLinear(nn.Linear):
    """A linear whose weight is this rank's part; not to be built, an `nn.Linear` becomes one."""

    boundary: Boundary

    @classmethod
    def take(cls, linear: nn.Linear, boundary: Boundary, parts: int = 1) -> None:
        """Let a whole linear become this rank's part of itself, in place.

        Args:
            linear: whole, the same on every rank.
            boundary: what lies outside the pair of matrices.
            parts: matrices that are fused in it along the outputs, each to be split for itself.
        """
        group = boundary.group
        cls._cut(linear, group.rank(), group.size(), parts)
        linear.__class__ = cls
        linear.boundary = boundary  # type: ignore[assignment]

    @classmethod
    def _cut(cls, linear: nn.Linear, rank: int, size: int, parts: int) -> None:
        raise NotImplementedError


class ColumnParallelLinear(SplitLinear):
    """This rank's outputs of y = x W^T + b."""

    @classmethod
    def _cut(cls, linear: nn.Linear, rank: int, size: int, parts: int) -> None:
        linear.weight = _own(linear.weight, rank, size, parts)
        linear.bias = _own(linear.bias, rank, size, parts)
        linear.out_features //= size

    def forward(self, x: Tensor) -> Tensor:
        """Map the tokens outside the split matrices to this rank's outputs."""
        return super().forward(self.boundary.enter(x))


class RowParallelLinear(SplitLinear):
    """y = sum over ranks of x W^T, for this rank's inputs; the bias is added once, after the sum."""

    @classmethod
    def _cut(cls, linear: nn.Linear, rank: int, size: int, parts: int) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].contiguous())
        linear.in_features //= size

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs to the tokens outside the split matrices."""
        y = self.boundary.leave(F.linear(x, self.weight))
        return y + self.boundary.parameter(self.bias).to(y.dtype)


def split_over_ranks(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which every rank has a part of its own."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, SplitLinear)
        for parameter in (
            ("weight", "bias") if isinstance(module, ColumnParallelLinear) else ("weight",)
        )
    }


def _own(whole: Any, rank: int, size: int, parts: int) -> nn.Parameter:
    """Cut each of `parts` equal blocks of rows into `size` and keep this rank's pieces."""
    pieces = whole.detach().unflatten(0, (parts, size, -1))[:, rank]
    return nn.Parameter(pieces.flatten(0, 1).clone())  # a view would keep the whole alive
