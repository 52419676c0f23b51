"""Buckets of ZeRO stage 1: gradients are scattered, updated parameters gathered (needs torch)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.owners import Parts
from vitsweep.collectives.parallel_linear import TokenSharded
from vitsweep.collectives.primitives import (
    aligned,
    broadcast_together,
    lacking_everywhere,
    start_mean_scatter,
    start_part_gather,
    view_like,
)

MIB = 2**20


class Bucket:
    """Parameters of one dtype in one flat buffer; each rank updates an equal part of it.

    The model's parameters and gradients become views of two buffers. A part begins and ends anywhere
    in a parameter; its slices of parameters are the `pieces` that the optimizer is given.

    Args:
        parameters: of one dtype on one device.
        group: n ranks that average these gradients; None for one rank alone.
        dtype: in which gradients are exchanged; None leaves them, and complex ones, as they are.

    Attributes:
        pieces: parameter -> this rank's slice of it, 1-D, for the optimizer; only where it has one.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: ProcessGroup | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters, self._group = parameters, group
        ranks, rank = (group.size(), group.rank()) if group else (1, 0)
        first = parameters[0].detach()
        self._dtype = None if first.is_complex() else dtype
        sizes = [aligned(p.numel(), p.element_size()) for p in parameters]
        length = ranks * aligned(-(-sum(sizes) // ranks), first.element_size())
        self._values, self._gradients = first.new_zeros(length), first.new_zeros(length)
        self._own = self._gradients if ranks == 1 else first.new_zeros(length // ranks)
        self._first = rank * (length // ranks)
        self._starts = dict(zip(parameters, accumulate(sizes, initial=0), strict=False))
        self._views = {p: view_like(self._gradients, p, s) for p, s in self._starts.items()}
        self._work: Any = None
        self._exchanged: tuple[Tensor, Tensor] | None = None  # sent and arriving, in `dtype`
        self._arrived: set[nn.Parameter] = set()
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, start in self._starts.items():
            view = view_like(self._values, parameter, start)
            view.copy_(parameter.detach())
            parameter.data = view
            low, high = self._slice(parameter)
            if low < high:
                self.pieces[parameter] = nn.Parameter(self._values.detach()[low:high])

    def _slice(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return where this rank's part of a parameter begins and ends in the buffer."""
        start = self._starts[parameter]
        end = self._first + len(self._own)
        return max(start, self._first), min(start + parameter.numel(), end)

    def first_number(self, parameter: nn.Parameter) -> int:
        """Return which number of a parameter, in the order of memory, this rank's piece begins with."""
        return self._slice(parameter)[0] - self._starts[parameter]

    def parts(self, parameter: nn.Parameter) -> Parts:
        """Return which numbers of a parameter, in the order of memory, each rank has."""
        start, share = self._starts[parameter], len(self._own)
        bounds = range(0, len(self._values) + 1, share)
        inside = tuple(min(max(bound - start, 0), parameter.numel()) for bound in bounds)
        return Parts(tuple(parameter.shape), inside, self._group)

    def keep(self, parameter: nn.Parameter) -> None:
        """Let the gradient of a parameter lie in the buffer, where later ones are added to it."""
        view, gradient = self._views[parameter], parameter.grad
        assert gradient is not None
        if gradient is not view:
            view.copy_(gradient)
            parameter.grad = view

    def complete_with(self, parameter: nn.Parameter) -> bool:
        """Note that a gradient is final; return whether all are."""
        self._arrived.add(parameter)
        return len(self._arrived) == len(self.parameters)

    def send(self) -> None:
        """Begin to average the gradients, unless that has begun; missing ones count as zero."""
        if self._work is not None:
            return
        for parameter, view in self._views.items():
            if parameter.grad is None:
                view.zero_()
        if self._group and self._group.size() > 1:
            sent, arriving = self._gradients, self._own
            if self._dtype:
                sent = sent.to(self._dtype)
                arriving = sent.new_empty(len(self._own))
                self._exchanged = sent, arriving
            self._work = start_mean_scatter(sent, arriving, self._group)

    def receive(self, unused: set[nn.Parameter]) -> None:
        """Wait for the mean gradients; give the pieces theirs, and none to those of unused parameters."""
        if self._work is not None:
            self._work.wait()
            if self._exchanged:
                self._own.copy_(self._exchanged[1])
                self._exchanged = None
        self._work = None
        self._arrived.clear()
        for parameter, piece in self.pieces.items():
            low, high = self._slice(parameter)
            own = self._own[low - self._first : high - self._first]
            piece.grad = None if parameter in unused else own

    def start_gather(self) -> Any:
        """Begin to collect the updated parts of all ranks; return a handle, None for one rank."""
        for parameter in self.parameters:
            parameter.grad = None
        if self._group and self._group.size() > 1:
            return start_part_gather(self._values, self._group)
        return None

    def whole(self, parameter: nn.Parameter, parts: dict[nn.Parameter, Tensor | None]) -> Tensor:
        """Join one tensor per piece, such as its gradient, over the ranks; every rank calls it.

        Returns:
            It in float32 or wider, as master weights have it; zeros where a part is None.
        """
        wide = torch.promote_types(self._values.dtype, torch.float32)
        joined = torch.zeros_like(self._values, dtype=wide)
        for other, part in parts.items():
            low, high = self._slice(other)
            if part is not None:
                joined[low:high] = part
        if self._group and self._group.size() > 1:
            start_part_gather(joined, self._group).wait()
        return view_like(joined, parameter, self._starts[parameter])


class ShardedReplica(nn.Module):
    """A replica that keeps optimizer state for its part of each bucket only.

    As soon as all gradients of a bucket are there, they are reduce-scattered while the backward pass
    goes on; buckets follow one another in the same order on all ranks, last layers first.

    Args:
        module: on its device, with parameters alike on all ranks.
        group: ranks whose gradients are averaged; None for one rank alone.
        bucket_mib: size of a bucket.
        dtype: in which gradients are exchanged; None leaves them as they are.

    Attributes:
        unused: parameters that had no gradient on any rank in this step; looked for in a module of the
            user's (`may_lack_gradients`).
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        bucket_mib: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self._group = module, group
        self.buckets = [
            Bucket(parameters, group, dtype) for parameters in _in_buckets(module, bucket_mib * MIB)
        ]
        self._ready, self._sent, self._exchanging = set[int](), 0, False
        self._may_lack_gradients = bool(getattr(module, "may_lack_gradients", False))
        self.unused = set[nn.Parameter]()
        # Megatron-SP sums gradients of norms and biases over other ranks first, after the backward pass.
        boundaries = [getattr(m, "boundary", None) for m in module.modules()]
        self._early = not any(isinstance(boundary, TokenSharded) for boundary in boundaries)
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module; running statistics are the first rank's, as under DDP."""
        statistics = [b for b in self.module.buffers() if b.is_floating_point()]
        if statistics and self.training and self._group and self._group.size() > 1:
            broadcast_together(statistics, self._group)
        return self.module(*inputs, **named)

    @contextmanager
    def exchanging(self, is_last_micro_batch: bool) -> Iterator[None]:
        """Send gradients during backward passes inside, where they are final."""
        self._exchanging = is_last_micro_batch and self._early
        try:
            yield
        finally:
            self._exchanging = False

    def complete_gradients(self) -> None:
        """Send what is not yet sent; wait until every piece has its mean gradient."""
        for bucket in self.buckets:
            bucket.send()
        if self._may_lack_gradients:
            self.unused = self._without_gradient()
        self._receive()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that was broken off; every rank calls it."""
        self._receive()
        self.module.zero_grad()

    def _receive(self) -> None:
        for bucket in self.buckets:
            bucket.receive(self.unused)
        self._ready.clear()
        self._sent = 0

    def _without_gradient(self) -> set[nn.Parameter]:
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        lacks = [p.grad is None for p in parameters]
        found = lacking_everywhere(lacks, parameters[0].device, self._group)
        return {parameters[index] for index in found}

    def _on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # of a function that gave none
            return
        bucket = self.buckets[index]
        bucket.keep(parameter)
        if not self._exchanging:
            return
        if bucket.complete_with(parameter):
            self._ready.add(index)
        while self._sent in self._ready:
            self.buckets[self._sent].send()
            self._sent += 1


def _in_buckets(module: nn.Module, size_bytes: float) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in the order in which backward passes reach them, a bucket's at a time."""
    filled: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        bucket = filled.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= size_bytes:
            yield filled.pop(parameter.dtype)
    yield from filled.values()
