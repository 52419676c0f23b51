"""How long single operators and collectives take on this rank's cores, by shape and dtype.

Every rank measures the same list at the same time, as the ranks of a training compete for cores, memory
bandwidth and power.
"""

import math
import mmap
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitsweep.collectives.primitives import all_gather_single, reduce_scatter_single
from vitsweep.extras.predict.step_time import BY_WEIGHT, FRESH, Exchanges, Shapes
from vitsweep.world import World

CHUNKS, CHUNK_SECONDS = 5, 0.001
"""The fastest of so many chunks of calls counts: what else runs here slows most of them."""
SMALL_SIDE = 256
LARGEST_FLOPS = 4e9
LONGEST_SECONDS = 0.02
"""Of larger products, and of those that take longer (a processor may emulate a format), a part is timed."""
LONG_CHUNKS = 10
"""A call that is longer than so many chunks is timed once: a short disturbance does not count in it."""
ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 19)
WIDTH = 256
"""Of the rows that norms, sums and softmax work on."""
SINGLE_ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
"""Of one parameter, as optimizers that loop over them see it."""
PARAMETERS = (1 << 12, 1 << 18, 1 << 21)
TENSORS = 152
"""Parameter tensors of a ViT of 12 blocks: the update of a list depends on their number as well."""
COLD_BYTES = 1 << 26
"""Weights and the states of optimizers are taken from so many bytes in turn: when a step comes back to one of
them, it has passed over more than the caches hold. Times of operators whose weights stayed in the cache were
1.1 (float32) to 1.4 (bfloat16) times too short, those of updates 1.6 times."""
FRESH_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One measured operator; `kind`, `name`, `dtype` and `shape` as in `predict.step_time`.

    Attributes:
        backward: whether it is one of the backward pass (attention, products).
        bytes_moved: bytes of its inputs and outputs; 0 for products and attentions.
        us: time of a call in microseconds.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    backward: bool = False
    bytes_moved: int = 0
    us: float = 0.0


Work = Callable[[], object]
Job = tuple[OperatorTime, Work, float]
"""An operator, what calls a part of it, and the whole over that part."""


def operator_times(shapes: Shapes, with_others: Container[str]) -> list[dict[str, Any]]:
    """Measure operators on this rank, each for milliseconds; all ranks call it at the same time.

    Args:
        shapes: of products and attentions.
        with_others: dtypes of which element-wise operators and updates are measured too.
    """
    found: list[dict[str, Any]] = []
    for dtype, wanted in shapes.items():
        parts = [_wanted(dtype, wanted)]
        if dtype in with_others:
            parts = [_elementwise(dtype, ELEMENTS), *parts, _updates(dtype, PARAMETERS)]
        for part in parts:
            with suppress(NotImplementedError):  # torch has no such operator in this format
                for operator, work, share in part:
                    found.append(asdict(operator) | {"us": share * _fastest_us(work)})
    return found


def collective_times(world: World, exchanges: Exchanges) -> list[dict[str, Any]]:
    """Measure collectives of all ranks, each for milliseconds."""
    found: list[dict[str, Any]] = []
    for name, dtype, size in exchanges:
        kind = getattr(torch, dtype)
        share = torch.zeros(max(1, size // kind.itemsize // world.size), dtype=kind)
        whole = torch.zeros(share.numel() * world.size, dtype=kind)
        works: dict[str, Work] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
            "all_gather": partial(all_gather_single, whole, share),
            "reduce_scatter": partial(reduce_scatter_single, share, whole),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
        }
        us = _equal_calls_us(works[name], 6 if size < 1 << 20 else 2)
        found.append({"name": name, "dtype": dtype, "bytes": size, "ranks": world.size, "us": us})
    return found


def _equal_calls_us(work: Work, calls: int) -> float:
    """Time a collective, which all ranks must call equally often."""
    times = []
    for _ in range(CHUNKS):
        dist.barrier()
        times.append(_chunk_seconds(work, calls, alone=False) / calls * 1e6)
    return min(times)


def _fastest_us(work: Work) -> float:
    """Return the fastest of some chunks of calls: other programs share the processor."""
    _chunk_seconds(work, 1)
    once = _chunk_seconds(work, 1)
    if once > LONG_CHUNKS * CHUNK_SECONDS:
        return once * 1e6
    calls = max(1, min(2000, round(CHUNK_SECONDS / once)))
    return min(_chunk_seconds(work, calls) / calls for _ in range(CHUNKS)) * 1e6


def _chunk_seconds(work: Work, calls: int, alone: bool = True) -> float:
    """Time some calls; those of a single thread by what they use of it, whoever else runs there.

    Args:
        work: what is called.
        calls: how often.
        alone: whether it waits for no other rank.
    """
    clock = time.thread_time if alone and torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(calls):
        work()
    return clock() - started


def _wanted(dtype: str, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[Job]:
    """Products and attentions; of those that take long a part, along the axis of tokens or images."""
    most = _most_flops(dtype)
    for name, whole in wanted:
        part = list(whole)
        along = {"addmm": 1, "mm": 1, BY_WEIGHT: 3}.get(name, 0)
        flops = (4 if name == "attention" else 2) * math.prod(whole)
        part[along] = max(1, math.floor(part[along] * min(1.0, most / flops)))
        facts: dict[str, Any] = {"name": name, "dtype": dtype, "shape": whole}
        share = whole[along] / part[along]
        if name != "attention":
            yield OperatorTime(kind="matmul", **facts), _product(dtype, name, part), share
            continue
        batch, heads, queries, keys, width = part
        lengths = (queries, keys, keys)
        q, k, v = (_random((batch, heads, n, width), dtype) for n in lengths)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v)
        gradient = _random(tuple(out.shape), dtype)
        backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        facts["kind"] = "attention"
        yield OperatorTime(**facts), partial(_without_gradients, q, k, v), share
        yield OperatorTime(**facts, backward=True), backward, share


def _product(dtype: str, name: str, shape: Sequence[int]) -> Work:
    """One of (batch, m, n, k); of `mm.t` and `addmm` one side is transposed as that of a linear layer is."""
    batch, m, n, k = shape
    if name == "bmm":
        left, right = (_random((batch, *side), dtype) for side in ((m, k), (k, n)))
        return partial(torch.bmm, left, right)
    if name == BY_WEIGHT:
        return partial(torch.mm, _random((k, m), dtype).t(), _random((k, n), dtype))
    x = _random((m, k), dtype)
    if name == "mm":
        return _in_turn(partial(torch.mm, x), _many((k, n), dtype))
    b = _random((n,), dtype)
    return _in_turn(partial(torch.addmm, b, x), [w.t() for w in _many((n, k), dtype)])


@cache
def _pool(dtype: str) -> Tensor:
    """`COLD_BYTES` of positive numbers."""
    part = (torch.rand(1 << 20) + 0.5).to(getattr(torch, dtype))
    return part.repeat(COLD_BYTES // part.nbytes)


def _many(shape: tuple[int, ...], dtype: str, most: int = 2048) -> list[Any]:
    """Return tensors that are used in turn, as many as `COLD_BYTES` hold."""
    size = math.prod(shape)
    if size > _pool(dtype).numel():
        return [_random(shape, dtype)]
    count = min(most, _pool(dtype).numel() // size)
    return list(_pool(dtype)[: count * size].view(count, *shape))


def _in_turn(work: Callable[..., object], *arguments: Sequence[Any]) -> Work:
    """Call the work with the first of each, then with the second of each, again and again."""
    turns = cycle(zip(*arguments, strict=True))
    return lambda: work(*next(turns))


def _most_flops(dtype: str) -> float:
    """Return the FLOPs of the largest product that is timed whole; they last `LONGEST_SECONDS` at most."""
    side = SMALL_SIDE // 2
    work = _product(dtype, "addmm", (1, side, side, side))
    seconds = min(_chunk_seconds(work, 1) for _ in range(CHUNKS))
    return min(LARGEST_FLOPS, LONGEST_SECONDS * 2 * side**3 / seconds)


def _without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(q, k, v)


def _elementwise(dtype: str, sizes: Sequence[int]) -> Iterator[Job]:
    aten = torch.ops.aten
    other = torch.float32 if dtype != "float32" else torch.bfloat16
    for elements in sizes:
        rows = max(1, elements // WIDTH)
        x, y = (_random((rows, WIDTH), dtype) for _ in range(2))
        z = _random((rows, WIDTH), dtype).abs_() + 1
        w, b = _random((WIDTH,), dtype), _random((WIDTH,), dtype)
        _, mean, rstd = aten.native_layer_norm(x, [WIDTH], w, b, 1e-6)
        soft = aten._softmax(x, -1, False)
        norm = (x, [WIDTH], w, b, 1e-6)
        norm_backward = (y, x, [WIDTH], mean, rstd, w, b, [True, True, True])
        works: dict[str, Work] = {
            "add": partial(torch.add, x, y),
            "add_": partial(y.add_, x, alpha=1e-9),
            "mul": partial(torch.mul, x, 0.5),
            "mul_": partial(y.mul_, 1.0),
            "div": partial(torch.div, x, z),
            "copy_": partial(y.copy_, x),
            "_to_copy": partial(x.to, other),
            "clone": x.clone,
            "cat": partial(torch.cat, [x, y]),
            "sum": partial(torch.sum, x, 0),
            "sqrt": z.sqrt,
            "lerp_": partial(y.lerp_, x, 1e-6),
            "addcmul_": partial(y.addcmul_, x, z, value=1e-9),
            "addcdiv_": partial(y.addcdiv_, x, z, value=1e-9),
            "zero_": torch.empty_like(x).zero_,
            "gelu": partial(aten.gelu, x),
            "gelu_backward": partial(aten.gelu_backward, y, x),
            "native_layer_norm": partial(aten.native_layer_norm, *norm),
            "native_layer_norm_backward": partial(aten.native_layer_norm_backward, *norm_backward),
            "_softmax": partial(aten._softmax, x, -1, False),
            "_softmax_backward_data": partial(aten._softmax_backward_data, y, soft, -1, soft.dtype),
        }
        passes = {"add": 3, "add_": 3, "div": 3, "lerp_": 3, "addcmul_": 4, "addcdiv_": 4, "cat": 4,
                  "sum": 1, "zero_": 1, "gelu_backward": 3, "native_layer_norm_backward": 3,
                  "_softmax_backward_data": 3}  # fmt: skip
        size = x.numel() * x.element_size()
        for name, work in works.items():
            yield (
                OperatorTime(
                    kind="memory", name=name, dtype=dtype, shape=(x.numel(),),
                    bytes_moved=passes.get(name, 2) * size,
                ),
                work,
                1.0,
            )  # fmt: skip


def _updates(dtype: str, sizes: Sequence[int]) -> Iterator[Job]:
    """Updates of parameters as optimizers do them, in lists and one by one (float32 only)."""
    if dtype != "float32":
        return
    for elements in sizes:
        parts = elements // TENSORS
        sets = [
            [list(each.view(TENSORS, parts)) for each in four]
            for four in _many((4, TENSORS * parts), dtype, most=32)
        ]
        steps = [torch.ones(()) for _ in range(TENSORS)]
        lists = list(zip(*sets, strict=True))
        works: dict[str, tuple[Callable[..., object], int]] = {
            "_fused_adamw_": (partial(_fused, steps), 7),
            "_foreach_add_": (lambda p, g, m, v: torch._foreach_add_(p, g, alpha=1e-9), 3),
            "_foreach_mul_": (lambda p, g, m, v: torch._foreach_mul_(p, 1.0), 2),
            "_foreach_lerp_": (lambda p, g, m, v: torch._foreach_lerp_(p, g, 1e-6), 3),
            "_foreach_addcmul_": (lambda p, g, m, v: torch._foreach_addcmul_(p, g, m, 1e-9), 4),
            "_foreach_addcdiv_": (lambda p, g, m, v: torch._foreach_addcdiv_(p, g, v, 1e-9), 4),
            "_foreach_sqrt": (lambda p, g, m, v: torch._foreach_sqrt(v), 2),
            "_foreach_div_": (lambda p, g, m, v: torch._foreach_div_(p, 1.0), 2),
        }
        for name, (work, passes) in works.items():
            yield _update(name, (TENSORS * parts, TENSORS), passes), _in_turn(work, *lists), 1.0
    for elements in SINGLE_ELEMENTS:
        tensors = list(zip(*_many((4, elements), dtype), strict=True))
        single: dict[str, tuple[Callable[..., object], int]] = {
            "add_": (lambda p, g, m, v: p.add_(1e-9), 2),
            "mul_": (lambda p, g, m, v: p.mul_(1.0), 2),
            "lerp_": (lambda p, g, m, v: m.lerp_(g, 1e-6), 3),
            "addcmul_": (lambda p, g, m, v: v.addcmul_(g, m, value=1e-9), 4),
            "addcdiv_": (lambda p, g, m, v: p.addcdiv_(m, v, value=1e-9), 4),
            "sqrt": (lambda p, g, m, v: v.sqrt(), 2),
            "div": (lambda p, g, m, v: v / 1.5, 2),
            "copy_": (lambda p, g, m, v: p.copy_(g), 2),
        }
        for name, (work, passes) in single.items():
            yield _update(name, (elements, 1), passes), _in_turn(work, *tensors), 1.0
    facts: dict[str, Any] = {"shape": (FRESH_BYTES // 4,), "bytes_moved": FRESH_BYTES}
    yield OperatorTime(kind="memory", name=FRESH, dtype=dtype, **facts), _fresh, 1.0


def _update(name: str, shape: tuple[int, int], passes: int) -> OperatorTime:
    moved = 4 * passes * shape[0]
    return OperatorTime(
        kind="optimizer", name=name, dtype="float32", shape=shape, bytes_moved=moved
    )


def _fresh() -> None:
    """Write to memory that the system has to provide first, and give it back."""
    with mmap.mmap(-1, FRESH_BYTES) as pages:
        for at in range(0, FRESH_BYTES, mmap.PAGESIZE):
            pages[at] = 1


def _fused(steps: list[Tensor], *lists: list[Tensor]) -> None:
    p, g, m, v = lists
    torch._fused_adamw_(
        p, g, m, v, [], steps, lr=1e-9, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def _random(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.randn(shape).to(getattr(torch, dtype))
