"""Values that ranks tell each other, as JSON or as tensors: nothing that another sends is unpickled.

`torch.distributed`'s own object collectives unpickle, so that whoever can reach the port of a run's
store could make its ranks execute code.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, by rank; every rank of it calls this.

    Args:
        value: as JSON takes it; numbers of NumPy become those of Python, tuples become lists.
        group: None for all ranks.
    """
    if not dist.is_initialized():
        return [value]
    own, count = _encoded(value, group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(own)], device=own.device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat([own, own.new_zeros(longest - len(own))])
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [_decoded(text[: int(size)]) for text, size in zip(texts, lengths, strict=True)]


def from_first(value: Any, group: dist.ProcessGroup | None = None, rank: int = 0) -> Any:
    """Return the value of one rank of a group, the first; those of the others do not matter."""
    if not dist.is_initialized():
        return value
    source = _global(rank, group)
    content = _encoded(value if source == dist.get_rank() else None, group)
    length = torch.tensor([len(content)], device=content.device)
    dist.broadcast(length, source, group=group)
    if source != dist.get_rank():
        content = torch.empty(int(length), dtype=torch.uint8, device=content.device)
    dist.broadcast(content, source, group=group)
    return _decoded(content)


def gathered_tensors(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]]:
    """Return the tensors of all ranks of a group, by rank; shapes and types may differ.

    Args:
        tensors: of this rank, on the device of the group.
        group: None for all ranks.
    """
    described = {
        k: (list(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in tensors.items()
    }
    found: list[dict[str, Tensor]] = []
    for rank, those in enumerate(gathered(described, group)):
        source = _global(rank, group)
        parts = {}
        for name, (shape, dtype) in those.items():
            if source == dist.get_rank():
                part = tensors[name].detach().contiguous()
            else:
                part = torch.empty(shape, dtype=getattr(torch, dtype), device=_device(group))
            dist.broadcast(part.reshape(-1).view(torch.uint8), source, group=group)
            parts[name] = part
        found.append(parts)
    return found


def _encoded(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    text = json.dumps(value, default=lambda number: number.item()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_device(group))


def _decoded(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
