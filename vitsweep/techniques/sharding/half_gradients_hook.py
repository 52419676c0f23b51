"""DDP's exchange of gradients in another dtype (needs torch)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future


@dataclass(frozen=True)
class Exchange:
    """How buckets are exchanged.

    Attributes:
        dtype: in which gradients are summed.
        group: ranks whose gradients are averaged; None stands for all.
    """

    dtype: torch.dtype
    group: ProcessGroup | None


def exchange_in_dtype(state: Exchange, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket in `state.dtype`, and copy the mean back.

    What torch's `bf16_compress_hook` does, which refuses to be registered without NCCL.
    """
    whole = bucket.buffer()
    # Divided before it is summed, so that the sum of many ranks stays in range.
    sent = whole.to(state.dtype).div_(dist.get_world_size(state.group))
    work: Any = dist.all_reduce(sent, group=state.group, async_op=True)

    def copy_back(_: Future[Any]) -> Tensor:
        return whole.copy_(sent)

    future: Future[Tensor] = work.get_future().then(copy_back)
    return future
