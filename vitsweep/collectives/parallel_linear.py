"""Linears split over ranks, by columns and by rows (Megatron-LM, arXiv:1909.08053, section 3)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives import primitives
from vitsweep.collectives.primitives import Finish, check_share, pad

# Megatron's operators around a pair of split matrices (arXiv:1909.08053, 2205.05198). Each backward pass is
# the other one's forward pass. The loss is counted once per group here: no gradient is scaled.


def gather_from_sequence_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' tokens (g-bar): an all-gather; backward is a reduce-scatter."""
    return _GatherFromSequenceParallel.apply(x, axis, group)


def scatter_to_sequence_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of a replicated tensor; the backward pass is an all-gather."""
    return _ScatterToSequenceParallel.apply(pad(x, axis, group.size()), axis, group)


def gather_replicated(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """All-gather for replicated computation; backward keeps this rank's part of the gradient."""
    return _GatherReplicated.apply(x, axis, group)


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return a replicated tensor (f) whose gradient each rank has a part of: backward is an all-reduce."""
    return _CopyToTensorParallel.apply(x, group)


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.clone(memory_format=torch.contiguous_format)  # others may read it too
        return primitives.start_sum(own, ctx.group)(), None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return primitives.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.reduce_scatter(gradient, ctx.axis, ctx.group), None, None


class _ScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return x.chunk(group.size(), axis)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.all_gather(gradient, ctx.axis, ctx.group), None, None


class _GatherReplicated(_GatherFromSequenceParallel):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.chunk(ctx.group.size(), ctx.axis)[ctx.group.rank()]
        return own.contiguous(), None, None


@dataclass(frozen=True)
class Block:
    """Where a run of rows or columns of a rank's part lies in the whole.

    Attributes:
        axis: 0 for rows, 1 for columns.
        in_part: first index in the rank's part.
        in_whole: first index in the whole.
        length: number of rows or columns.
    """

    axis: int
    in_part: int
    in_whole: int
    length: int


@dataclass(frozen=True)
class Replicated:
    """Every rank of the group has all tokens outside the split matrices."""

    group: ProcessGroup

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens."""
        return x

    def beside_tokens(self, x: Tensor) -> Tensor:
        """Return a tensor without tokens as it meets those outside: every rank gets its whole gradient."""
        return x

    def start_sum(self, partial: Tensor) -> Finish:
        """Begin to sum partial products of all tokens, in place; return what waits for the sum."""
        return primitives.start_sum(partial, self.group)


@dataclass(frozen=True)
class TokenSharded:
    """Every rank has its own tokens outside the split matrices (arXiv:2205.05198, section 4.2).

    Parameters used on own tokens get a part of their gradient on each rank; what is to be summed at
    the end of a step are those of norms and the biases of `RowParallelLinear`.

    Attributes:
        group: ranks of the split.
        axis: of the tokens.
        length: tokens over all ranks without padding; None keeps what padding there is.
    """

    group: ProcessGroup
    axis: int
    length: int | None

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tokens; padding stays outside."""
        if self.length is not None:
            check_share(x, self.axis, self.length, self.group)
        whole = primitives.all_gather(x, self.axis, self.group)
        return whole if self.length is None else whole.narrow(self.axis, 0, self.length)

    def beside_tokens(self, x: Tensor) -> Tensor:
        """Return a tensor without tokens as it meets own ones: its gradient is summed over the ranks."""
        return copy_to_tensor_parallel(x, self.group)

    def start_sum(self, partial: Tensor) -> Finish:
        """Start a reduce-scatter of partial products; return a function that waits for own tokens' sum."""
        padded = pad(partial, self.axis, self.group.size())
        return primitives.start_reduce_scatter(padded, self.axis, self.group)


Boundary = Replicated | TokenSharded


class _ColumnProduct(torch.autograd.Function):
    """x W^T + b for all tokens; backward multiplies for the weight while the gradient of x is summed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, boundary: Boundary
    ) -> Tensor:
        whole = boundary.gather(x)
        ctx.boundary, ctx.has_bias = boundary, bias is not None
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole, weight = ctx.saved_tensors
        of_x = ctx.boundary.start_sum(gradient @ weight)
        rows = gradient.flatten(0, -2)
        of_weight = rows.mT @ whole.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.has_bias else None
        return of_x(), of_weight, of_bias, None


class _Sum(torch.autograd.Function):
    """Partial products, summed over the ranks in their own memory, which nobody else reads.

    Separate from the product: a recomputation, which stops once it has all inputs of products, sends nothing.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        # Selective recomputation keeps products, through a dispatch mode; compilers allow no change in place.
        is_kept = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        own = partial.clone() if is_kept else partial.detach()
        return boundary.start_sum(own)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.boundary.gather(gradient), None


def _autocast(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the dtype in which a linear multiplies here."""
    if not torch.is_autocast_enabled(device.type):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device.type)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


class SplitLinear(nn.Linear):
    """A linear whose weight is this rank's part; not to be built, an `nn.Linear` becomes one.

    Attributes:
        boundary: what lies outside the pair of matrices.
        parts: matrices that are fused in it along the outputs, each split for itself.
    """

    boundary: Boundary
    parts: int

    def take(self, boundary: Boundary, parts: int = 1) -> None:
        """Keep this rank's part of the whole parameters, which are the same on every rank.

        Args:
            boundary: what lies outside the pair of matrices.
            parts: matrices that are fused in it along the outputs, each to be split for itself.
        """
        self.boundary, self.parts = boundary, parts
        for name, whole in [*self.named_parameters()]:
            # A copy: a view would keep the whole alive.
            setattr(self, name, nn.Parameter(self.part_of(name, whole.detach()).clone()))
        self.out_features, self.in_features = self.weight.shape

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole `weight` or `bias`, which this rank has a part of."""
        raise NotImplementedError

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole `weight` or `bias`."""
        raise NotImplementedError

    def blocks(self, name: str) -> list[Block]:
        """Return the blocks of the whole `weight` or `bias` that this rank's part consists of."""
        raise NotImplementedError


class ColumnParallelLinear(SplitLinear):
    """This rank's outputs of y = x W^T + b."""

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """All ranks' outputs."""
        outputs, *rest = getattr(self, name).shape
        return (outputs * self.boundary.group.size(), *rest)

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Cut each fused matrix into equal blocks of rows and keep one of each."""
        group = self.boundary.group
        pieces = whole.unflatten(0, (self.parts, group.size(), -1))
        return pieces[:, group.rank()].flatten(0, 1)

    def blocks(self, name: str) -> list[Block]:
        """One block of rows of each fused matrix."""
        group, rows = self.boundary.group, getattr(self, name).shape[0] // self.parts
        return [
            Block(0, part * rows, (part * group.size() + group.rank()) * rows, rows)
            for part in range(self.parts)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Map the tokens outside the split matrices to this rank's outputs."""
        return _ColumnProduct.apply(*_autocast(x.device, x, self.weight, self.bias), self.boundary)


class RowParallelLinear(SplitLinear):
    """y = sum over ranks of x W^T, for this rank's inputs; the bias is added once, after the sum."""

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """All ranks' inputs; the bias is whole."""
        outputs, *inputs = getattr(self, name).shape
        return (outputs, *(n * self.boundary.group.size() for n in inputs))

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Keep one of equal blocks of columns; the bias is whole."""
        group = self.boundary.group
        return whole if name == "bias" else whole.chunk(group.size(), 1)[group.rank()]

    def blocks(self, name: str) -> list[Block]:
        """One block of columns; the bias is whole."""
        if name == "bias":
            return []
        columns = getattr(self, name).shape[1]
        return [Block(1, 0, self.boundary.group.rank() * columns, columns)]

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs to the tokens outside the split matrices."""
        y = _Sum.apply(F.linear(x, self.weight), self.boundary)
        return y + self.bias.to(y.dtype)


def split_over_ranks(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which every rank has a part of its own."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, SplitLinear)
        for parameter, _ in module.named_parameters()
        if parameter == "weight" or isinstance(module, ColumnParallelLinear)
    }
