"""Collectives on one tensor along any axis, without gradients, and what ranks tell each other.

Spelled for torch 2.9 to 2.15.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.spec.model_parallel import padded_share


def local(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def unpadded_length(length: int, part: int, index: int) -> int:
    """Length without padding of part number `index`, where every part is `part` long."""
    return min(part, max(0, length - index * part))


def pad(x: Tensor, axis: int, ranks: int) -> Tensor:
    """Append zeros along `axis` until its length is a multiple of `ranks`."""
    missing = padded_share(x.shape[axis], ranks) * ranks - x.shape[axis]
    if not missing:
        return x
    return F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])


def check_share(x: Tensor, axis: int, length: int, group: ProcessGroup) -> None:
    """Make sure that a rank holds its share of an axis: unequal shares would hang a collective.

    Raises:
        ValueError: the local length is another than `padded_share(length, size)`.
    """
    expected = padded_share(length, group.size())
    if x.shape[axis] != expected:
        raise ValueError(
            f"Axis {axis} of a tensor {tuple(x.shape)} has {x.shape[axis]} positions on rank "
            f"{group.rank()}; {length} positions over {group.size()} ranks are {expected} on each, "
            "padding included. Split it with `resharding.split`."
        )


# Where parameters lie in a flat buffer (needs torch).


ALIGNMENT_BYTES = 256
"""Every view starts at a multiple of it: matrix kernels want aligned operands (cuBLAS: 16 B)."""


def aligned(numbers: int, element_size: int) -> int:
    """Return the least multiple of the alignment that holds so many numbers, in numbers."""
    step = ALIGNMENT_BYTES // element_size
    return -(-numbers // step) * step


def view_like(buffer: Tensor, like: Tensor, start: int) -> Tensor:
    """Return a part of `buffer` with the shape of `like`, channels_last where `like` is."""
    part = buffer[start : start + like.numel()]
    if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(like.size(), like.stride(), part.storage_offset())
    return part.view(like.shape)


def lacking_everywhere(
    lacks: Sequence[bool], device: torch.device, group: ProcessGroup | None
) -> list[int]:
    """Return which of some things no rank has, where each says what it lacks; every rank calls it.

    A rank that lacks nothing knows the answer, and does not wait for the exchange on a GPU.

    Args:
        lacks: of this rank, equally many on all.
        device: on which ranks exchange.
        group: of the ranks; None stands for all.
    """
    everywhere = torch.tensor(lacks, dtype=torch.uint8).to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return everywhere.nonzero().flatten().tolist() if any(lacks) else []


Purpose = Literal["parameter", "gradient", "optimizer", "activation", "unattributed"]

_purpose: ContextVar[Purpose | None] = ContextVar("purpose", default=None)


@contextmanager
def sent_as(purpose: Purpose) -> Iterator[None]:
    """Count the bytes of all collectives inside under `purpose`.

    Compiled code leaves it out, since Dynamo would break the graph at it. Nothing is lost: the step that
    is counted runs under a dispatch mode, and so uncompiled.
    """
    if torch.compiler.is_compiling():
        yield
        return
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def current_purpose() -> Purpose | None:
    """Return the purpose of the enclosing `sent_as`, or None outside of any."""
    return _purpose.get()


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch 2.13 deprecates the old names of both, torch 2.9 does not have the new ones."""


def all_to_all(x: Tensor, split: int, concatenate: int, group: ProcessGroup) -> Tensor:
    """Send chunk i along axis `split` to rank i; join what arrives along axis `concatenate`.

    The length of `split` must be a multiple of the group's size. Both axes count from the front.
    """
    size = group.size()
    if size == 1:
        return x
    chunks = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    return (
        exchange_chunks(chunks, group).movedim(0, concatenate).flatten(concatenate, concatenate + 1)
    )


def exchange_chunks(chunks: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk i, along the first axis of a contiguous tensor, to rank i; return what arrives."""
    received = torch.empty_like(chunks)
    with sent_as("activation"):
        dist.all_to_all_single(received, chunks, group=group)
    return received


def all_gather(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the tensors of all ranks, of equal shape, along `axis`."""
    size = group.size()
    if size == 1:
        return x
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))  # gloo takes no other shape
    with sent_as("activation"):
        all_gather_single(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (size, -1)).movedim(0, axis).flatten(axis, axis + 1)


def reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks; return this rank's chunk along `axis`, a multiple of the group's size."""
    return start_reduce_scatter(x, axis, group)()


Finish = Callable[[], Tensor]
"""Waits for a collective (on CUDA: lets the stream wait) and returns its result."""


def start_reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Finish:
    """Begin what `reduce_scatter` does."""
    size = group.size()
    if size == 1:
        return lambda: x
    chunks = x.unflatten(axis, (size, -1)).movedim(axis, 0).contiguous()
    own = torch.empty_like(chunks[0])
    with sent_as("activation"):
        work = reduce_scatter_single(own, chunks.flatten(0, 1), group=group, async_op=_apart())
    return _after(work, own)


def start_sum(x: Tensor, group: ProcessGroup) -> Finish:
    """Begin to sum a contiguous tensor over the ranks, in place."""
    if group.size() == 1:
        return lambda: x
    with sent_as("activation"):
        work = dist.all_reduce(x, group=group, async_op=_apart())
    return _after(work, x)


def _apart() -> bool:
    """Whether a collective overlaps with what follows; a compiler refuses that, and orders them itself."""
    return not torch.compiler.is_compiling()


def _after(work: Any, result: Tensor) -> Finish:
    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return finish


def sum_together(tensors: Sequence[Tensor], group: ProcessGroup, purpose: Purpose) -> None:
    """Sum each of several tensors over the ranks, in place: one all-reduce per dtype."""
    if group.size() > 1:
        with sent_as(purpose):
            _together(tensors, lambda joined: dist.all_reduce(joined, group=group))


def _together(tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Change tensors in place as one flat tensor per dtype."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some = [t for t in tensors if t.dtype == dtype]
        joined = torch.cat([t.flatten() for t in some])
        send(joined)
        pieces = joined.split([t.numel() for t in some])
        torch._foreach_copy_(some, [p.view_as(t) for p, t in zip(pieces, some, strict=True)])


def start_mean_scatter(whole: Tensor, own: Tensor, group: ProcessGroup) -> Any:
    """Begin to average `whole` (n S) over the ranks; `own` (S) gets this rank's part.

    Divided before it is summed, so that a sum of float16 gradients does not overflow.

    Returns:
        A handle; `own` holds the result after its `wait()`.
    """
    averages = whole.is_cuda  # NCCL divides within the collective
    if not averages:
        whole.div_(group.size())
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    with sent_as("gradient"):
        return reduce_scatter_single(own, whole, op=op, group=group, async_op=True)


def start_part_gather(whole: Tensor, group: ProcessGroup) -> Any:
    """Begin to give every rank all parts of `whole` (n S), of which each has its own in place.

    Returns:
        A handle; `whole` holds the result after its `wait()`.
    """
    own = whole.chunk(group.size())[group.rank()]
    with sent_as("parameter"):
        return all_gather_single(whole, own, group=group, async_op=True)


def broadcast_together(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Give every rank the first rank's tensors, in place: one broadcast per dtype."""
    source = dist.get_global_rank(group, 0)
    _together(tensors, lambda joined: dist.broadcast(joined, source, group=group))


class RingPass:
    """An asynchronous pass around a ring: sent to the next rank, received from the previous one.

    Args:
        tensor: what is sent; not to be changed until `arrived`.
        group: the ring; its last rank sends to its first.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        to, source = (dist.get_global_rank(group, (rank + i) % size) for i in (1, -1))
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        pair = [
            dist.P2POp(dist.isend, self._sent, to, group),
            dist.P2POp(dist.irecv, self._received, source, group),
        ]
        with sent_as("activation"):
            self._works: list[Any] = dist.batch_isend_irecv(pair)

    def arrived(self) -> Tensor:
        """Wait (on CUDA: let the stream wait) and return what came."""
        for work in self._works:
            work.wait()
        return self._received


# Values that ranks tell each other, as JSON or as tensors: nothing that another sends is unpickled.
# `torch.distributed`'s own object collectives unpickle, so that whoever can reach the port of a run's
# store could make its ranks execute code.


def gathered(
    value: Any, group: dist.ProcessGroup | None = None, *, on_first: bool = False
) -> list[Any]:
    """Return the values of all ranks of a group, by rank; every rank of it calls this.

    Args:
        value: as JSON takes it; numbers of NumPy become those of Python, tuples become lists.
        group: None for all ranks.
        on_first: only the first rank gets them, which takes long to read those of thousands; others get
            none.
    """
    if not dist.is_initialized():
        return [value]
    own, count = _encoded(value, group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(own)], device=own.device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat([own, own.new_zeros(longest - len(own))])
    texts = [torch.empty_like(padded) for _ in lengths if not on_first or dist.get_rank(group) == 0]
    if on_first:
        dist.gather(padded, texts or None, _global(0, group), group=group)
    else:
        dist.all_gather(texts, padded, group=group)
    return [_decoded(text[: int(size)]) for text, size in zip(texts, lengths, strict=False)]


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
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
    keep: Callable[[Tensor], Tensor | None] = lambda tensor: tensor,
) -> list[dict[str, Tensor]]:
    """Return the tensors of all ranks of a group, by rank; shapes and types may differ.

    Args:
        tensors: of this rank, on the device of the group.
        group: None for all ranks.
        keep: takes each tensor as it arrives; what it gives None for is freed and left out.
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
            if (kept := keep(part)) is not None:
                parts[name] = kept
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
