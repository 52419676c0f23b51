"""What DistributedDataParallel does to gradients, on fake tensors (needs torch).

DDP's reducer, in C++, reads the memory of tensors, which fake ones do not have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is smaller, so that the exchange starts early (torch.distributed)."""


class _Reducer:
    """What torch's pipelines call on a DDP module before the backward pass of the last micro-batch."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing: the hooks are there already."""


class Replica(nn.Module):
    """Gradients copied to buckets, which are reduced as soon as they are full.

    Args:
        module: whose gradients are averaged.
        process_group: over which; None for all ranks.
        bucket_cap_mb: size of a bucket in MiB.
        gradient_as_bucket_view: gradients become views of the buckets.
        _: what else DDP takes.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.module, self._group, self._sync = module, process_group, True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._exchange_dtype: torch.dtype | None = None
        self.reducer = _Reducer()
        # Built anew after the first step, in the order in which gradients come: the last ones first.
        parameters: list[Any] = [p for p in module.parameters() if p.requires_grad][::-1]
        limits = [FIRST_BUCKET_BYTES, int(bucket_cap_mb * 2**20)]
        indices, _limits = dist._compute_bucket_assignment_by_size(parameters, limits)  # type: ignore[attr-defined]
        self.buckets: list[Tensor] = []
        for bucket in indices:
            self._fill([parameters[index] for index in bucket])

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Make one bucket, reduced when all its gradients have come."""
        total = sum(p.numel() for p in parameters)
        bucket = torch.empty(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self.buckets.append(bucket)
        waiting: set[Tensor] = set(parameters)
        start = 0
        for parameter in parameters:
            view = bucket[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(
                lambda p, view=view: self._take(p, view, waiting, parameters, bucket)
            )

    def _take(
        self,
        parameter: Tensor,
        view: Tensor,
        waiting: set[Tensor],
        parameters: list[nn.Parameter],
        bucket: Tensor,
    ) -> None:
        if not self._sync:
            return
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        if self.gradient_as_bucket_view:
            parameter.grad = view
        waiting.discard(parameter)
        if waiting:
            return
        waiting.update(parameters)
        sent = bucket.to(self._exchange_dtype or bucket.dtype)
        sent.div_(dist.get_world_size(self._group))
        dist.all_reduce(sent, group=self._group)
        if sent is not bucket:
            bucket.copy_(sent)
        if not self.gradient_as_bucket_view:
            start = 0
            for each in parameters:
                assert each.grad is not None
                each.grad.copy_(bucket[start : start + each.numel()].view(each.shape))
                start += each.numel()

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Exchange gradients in the dtype of the state, as `sharding.gradient_dtype` asks for."""
        self._exchange_dtype = state.dtype

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, after sending its buffers (BatchNorm's statistics) from the first rank."""
        buffers = list(self.module.buffers())
        if self._sync and self.training and buffers:
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                some = torch.cat([b.flatten() for b in buffers if b.dtype == dtype])
                dist.broadcast(
                    some, dist.get_process_group_ranks(self._group)[0], group=self._group
                )
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients inside."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True
