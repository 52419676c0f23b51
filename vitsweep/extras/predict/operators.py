"""How long single operators and collectives take on this rank's device, by shape and dtype.

Every rank measures the same list at the same time, as the ranks of a training compete for cores,
memory bandwidth and power. Inputs are random: products of zeros draw less power on a GPU.
"""

import math
import mmap
import statistics
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
from vitsweep.extras.predict.calibration import BY_WEIGHT, FRESH, Exchanges, Shapes
from vitsweep.rates.reached import CHUNKS, SMALL_SIDE
from vitsweep.world import World, allow_tf32

CHUNK_SECONDS = {"cpu": 0.004, "cuda": 0.005}
QUICK_SECONDS = 0.001
"""The same of operators of the cells of a plan."""
LARGEST_FLOPS = {"cpu": 4e9, "cuda": 4e12}
LONGEST_SECONDS = 0.02
"""Of larger products, and of those that take longer on a CPU (it may emulate a format), a part is timed."""
LAUNCH_SECONDS = 1e-4
"""On a GPU, a call that the host sees end within this time is replayed from a CUDA graph: the host takes some
10 us to launch a kernel, as long as the kernel itself or longer."""
MOST_RECORDED = 500
LONG_CHUNKS = 10
"""A call that is longer than so many chunks is timed once: a short disturbance does not count in it."""
TOKENS = {"cpu": (32, 256, 2048, 8192), "cuda": (2048, 16384, 65536)}
LINEARS = {  # (inputs, outputs)
    "cpu": ((128, 128), (128, 512), (192, 192), (768, 192), (384, 1536), (768, 768), (768, 3072)),
    "cuda": ((768, 768), (768, 3072), (3072, 768), (1024, 4096), (1280, 5120), (5120, 5120)),
}
ATTENTIONS = {  # (batch, heads, tokens, head width)
    "cpu": ((128, 4, 17, 32), (8, 4, 17, 32), (8, 3, 26, 64), (8, 3, 50, 64), (32, 4, 65, 32),
            (4, 3, 197, 64), (16, 3, 197, 64), (2, 6, 577, 64)),
    "cuda": ((64, 12, 197, 64), (16, 16, 577, 64), (64, 16, 257, 80), (4, 12, 4096, 64)),
}  # fmt: skip
ELEMENTS = {
    "cpu": (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22),
    "cuda": (1 << 12, 1 << 20, 1 << 24, 1 << 27),
}
WIDTH = 256
"""Of the rows that norms, sums and softmax work on."""
SINGLE_ELEMENTS = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
"""Of one parameter, as optimizers that loop over them see it."""
PARAMETERS = {"cpu": (1 << 12, 1 << 18, 1 << 21, 1 << 23), "cuda": (1 << 14, 1 << 26, 1 << 28)}
TENSORS = 152
"""Parameter tensors of a ViT of 12 blocks: the update of a list depends on their number as well."""
COLD_BYTES = 1 << 26
"""On a CPU, weights and the states of optimizers are taken from so many bytes in turn: when a step comes back
to one of them, it has passed over more than the caches hold. Times of operators whose weights stayed in the
cache were 1.1 (float32) to 1.4 (bfloat16) times too short, those of updates 1.6 times."""
FRESH_BYTES = 1 << 22
COLLECTIVE_BYTES = {
    "cpu": (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 26),
    "cuda": (1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 27, 1 << 30),
}

LARGEST_HALF_SUM = 1 << 24
"""Bytes of the largest sum of bfloat16 that is timed, which gloo adds in software."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One measured operator; `kind`, `name`, `dtype` and `shape` as in `predict.step_time`.

    Attributes:
        backward: whether it is one of the backward pass (attention, products).
        bytes_moved: bytes of its inputs and outputs.
        us: median time of a call in microseconds.
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


def common_shapes(device: str, dtypes: Sequence[str]) -> Shapes:
    """Return shapes from which those of most cells can be interpolated, for a device type."""
    products = [
        product
        for tokens in TOKENS[device]
        for inputs, outputs in LINEARS[device]
        for product in (
            ("addmm", (1, tokens, outputs, inputs)),
            ("mm", (1, tokens, inputs, outputs)),
            (BY_WEIGHT, (1, outputs, inputs, tokens)),
        )
    ]
    attentions = [
        ("attention", (b, heads, t, t, width)) for b, heads, t, width in ATTENTIONS[device]
    ]
    return {dtype: [*products, *([] if dtype == "tf32" else attentions)] for dtype in dtypes}


def operator_times(
    world: World,
    shapes: Shapes,
    with_others: Container[str],
    end: float = math.inf,
    quick: bool = False,
) -> list[dict[str, Any]]:
    """Measure operators on this rank; all ranks call it at the same time.

    Args:
        world: ranks.
        shapes: of products and attentions.
        with_others: dtypes of which element-wise operators and updates are measured too.
        end: at this time of `time.monotonic` what is not measured is left out; the first dtype comes first.
        quick: measure each for milliseconds, instead of tens of them.
    """
    found: list[dict[str, Any]] = []
    chunk = QUICK_SECONDS if quick else CHUNK_SECONDS[world.device.type]
    for dtype, wanted in shapes.items():
        is_tf32 = dtype == "tf32"
        stored = "float32" if is_tf32 else dtype
        allow_tf32(is_tf32)
        parts = [_wanted(world.device, stored, wanted)]
        if dtype in with_others and not is_tf32:
            most = -1 if quick else None  # the largest take half of the time
            elements = ELEMENTS[world.device.type][:most]
            parameters = PARAMETERS[world.device.type][:most]
            others = _elementwise(world.device, stored, elements)
            parts = [others, *parts, _updates(world.device, stored, parameters)]
        for part in parts:
            with suppress(NotImplementedError):  # the device has no such operator in this format
                for operator, work, share in part:
                    if time.monotonic() > end:
                        return found
                    # autograd would leave the recorded stream
                    recordable = operator.kind != "attention"
                    us = share * _typical_us(work, world.device, recordable, chunk)
                    found.append(asdict(operator) | {"dtype": dtype, "us": us})
    allow_tf32(False)
    return found


def collective_times(
    world: World,
    goes_on: Callable[[], bool] = lambda: True,
    exchanges: Exchanges | None = None,
) -> list[dict[str, Any]]:
    """Measure the collectives of all ranks by size of the whole tensor; [] for one rank.

    Args:
        world: ranks.
        goes_on: is asked on all ranks before each; where it is false, the larger ones are left out.
        exchanges: measure these, each for milliseconds; None for common ones.
    """
    if world.size < 2:
        return []
    found: list[dict[str, Any]] = []
    for name, dtype, size in (
        common_exchanges(world.device.type) if exchanges is None else exchanges
    ):
        if not goes_on():
            return found
        options: dict[str, Any] = {"device": world.device, "dtype": getattr(torch, dtype)}
        itemsize = torch.empty((), dtype=options["dtype"]).element_size()
        share = torch.zeros(max(1, size // itemsize // world.size), **options)
        whole = torch.zeros(share.numel() * world.size, **options)
        works: dict[str, Work] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
            "all_gather": partial(all_gather_single, whole, share),
            "reduce_scatter": partial(reduce_scatter_single, share, whole),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
        }
        few, many = (2, 6) if exchanges is not None else (5, 20)
        calls = many if size < 1 << 20 else few
        us = _equal_calls_us(works[name], calls, world)
        found.append({"name": name, "dtype": dtype, "bytes": size, "ranks": world.size, "us": us})
    return found


def common_exchanges(device: str) -> Exchanges:
    """Return collectives from which those of most cells can be interpolated, for a device type."""
    names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
    sizes = COLLECTIVE_BYTES[device]
    halves = [("all_reduce", "bfloat16", size) for size in sizes if size <= LARGEST_HALF_SUM]
    return [*((name, "float32", size) for size in sizes for name in names), *halves]


def _equal_calls_us(work: Work, calls: int, world: World) -> float:
    """Time a collective, which all ranks must call equally often."""
    times = []
    for _ in range(CHUNKS):
        dist.barrier()
        times.append(_chunk_seconds(work, calls, world.device, alone=False) / calls * 1e6)
    return (min if world.device.type == "cpu" else statistics.median)(times)


def _typical_us(work: Work, device: torch.device, recordable: bool, chunk: float) -> float:
    """Return the median of chunks of calls; on a CPU, which other programs share, the fastest."""
    _chunk_seconds(work, 1, device)
    once = _chunk_seconds(work, 1, device)
    calls = max(1, min(2000, round(chunk / max(once, 1e-7))))
    if once > LONG_CHUNKS * chunk:
        return once * 1e6
    if device.type == "cuda" and recordable and once < LAUNCH_SECONDS:
        recorded = min(calls, MOST_RECORDED)
        replay = _recorded(work, recorded)
        replay()
        times = [_chunk_seconds(replay, 1, device) / recorded for _ in range(CHUNKS)]
    else:
        times = [_chunk_seconds(work, calls, device) / calls for _ in range(CHUNKS)]
    return (min if device.type == "cpu" else statistics.median)(times) * 1e6


def _recorded(work: Work, calls: int) -> Work:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay


def _chunk_seconds(work: Work, calls: int, device: torch.device, alone: bool = True) -> float:
    """Time some calls; those of a single thread of a CPU by what they use of it, whoever else runs there.

    Args:
        work: what is called.
        calls: how often.
        device: on which it works.
        alone: whether it waits for no other rank.
    """
    own = alone and device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if own else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def _wanted(
    device: torch.device, dtype: str, wanted: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[Job]:
    """Products and attentions; of those that take long a part, along the axis of tokens or images."""
    most = _most_flops(device, dtype)
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    for name, whole in wanted:
        part = list(whole)
        along = {"addmm": 1, "mm": 1, BY_WEIGHT: 3}.get(name, 0)
        flops = (4 if name == "attention" else 2) * math.prod(whole)
        part[along] = max(1, math.floor(part[along] * min(1.0, most / flops)))
        facts: dict[str, Any] = {"name": name, "dtype": dtype, "shape": whole}
        share = whole[along] / part[along]
        if name != "attention":
            batch, rows, columns, inner = whole
            moved = size * batch * (rows * inner + inner * columns + rows * columns)
            operator = OperatorTime(kind="matmul", **facts, bytes_moved=moved)
            yield operator, _product(device, dtype, name, part), share
            continue
        batch, heads, queries, keys, width = part
        lengths = (queries, keys, keys)
        q, k, v = (_random((batch, heads, n, width), device, dtype) for n in lengths)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v)
        gradient = _random(tuple(out.shape), device, dtype)
        backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        moved = 4 * math.prod(whole) // keys * size
        facts["kind"] = "attention"
        yield OperatorTime(**facts, bytes_moved=moved), partial(_without_gradients, q, k, v), share
        yield OperatorTime(**facts, bytes_moved=2 * moved, backward=True), backward, share


def _product(device: torch.device, dtype: str, name: str, shape: Sequence[int]) -> Work:
    """One of (batch, m, n, k); of `mm.t` and `addmm` one side is transposed as that of a linear layer is."""
    batch, m, n, k = shape
    if name == "bmm":
        left, right = (_random((batch, *side), device, dtype) for side in ((m, k), (k, n)))
        return partial(torch.bmm, left, right)
    if name == BY_WEIGHT:
        return partial(torch.mm, _random((k, m), device, dtype).t(), _random((k, n), device, dtype))
    x = _random((m, k), device, dtype)
    if name == "mm":
        return _in_turn(partial(torch.mm, x), _many((k, n), device, dtype))
    b = _random((n,), device, dtype)
    return _in_turn(partial(torch.addmm, b, x), [w.t() for w in _many((n, k), device, dtype)])


@cache
def _pool(dtype: str) -> Tensor:
    """`COLD_BYTES` of positive numbers on the CPU."""
    part = (torch.rand(1 << 20) + 0.5).to(getattr(torch, dtype))
    return part.repeat(COLD_BYTES // part.nbytes)


def _many(shape: tuple[int, ...], device: torch.device, dtype: str, most: int = 2048) -> list[Any]:
    """Return tensors that are used in turn: on a CPU as many as `COLD_BYTES` hold, else one."""
    size = math.prod(shape)
    if device.type != "cpu" or size > _pool(dtype).numel():
        return [_random(shape, device, dtype)]
    count = min(most, _pool(dtype).numel() // size)
    return list(_pool(dtype)[: count * size].view(count, *shape))


def _in_turn(work: Callable[..., object], *arguments: Sequence[Any]) -> Work:
    """Call the work with the first of each, then with the second of each, again and again."""
    turns = cycle(zip(*arguments, strict=True))
    return lambda: work(*next(turns))


def _most_flops(device: torch.device, dtype: str) -> float:
    """Return the FLOPs of the largest product that is timed whole; on a CPU they last `LONGEST_SECONDS`."""
    most = LARGEST_FLOPS[device.type]
    if device.type == "cuda":
        return most
    side = SMALL_SIDE // 2
    work = _product(device, dtype, "addmm", (1, side, side, side))
    seconds = min(_chunk_seconds(work, 1, device) for _ in range(CHUNKS))
    return min(most, LONGEST_SECONDS * 2 * side**3 / max(seconds, 1e-7))


def _without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(q, k, v)


def _elementwise(device: torch.device, dtype: str, sizes: Sequence[int]) -> Iterator[Job]:
    aten = torch.ops.aten
    other = torch.float32 if dtype != "float32" else torch.bfloat16
    for elements in sizes:
        rows = max(1, elements // WIDTH)
        x, y = (_random((rows, WIDTH), device, dtype) for _ in range(2))
        z = _random((rows, WIDTH), device, dtype).abs_() + 1
        w, b = _random((WIDTH,), device, dtype), _random((WIDTH,), device, dtype)
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


def _updates(device: torch.device, dtype: str, sizes: Sequence[int]) -> Iterator[Job]:
    """Updates of parameters as optimizers do them, in lists and one by one (float32 only)."""
    if dtype != "float32":
        return
    for elements in sizes:
        parts = elements // TENSORS
        sets = [
            [list(each.view(TENSORS, parts)) for each in four]
            for four in _many((4, TENSORS * parts), device, dtype, most=32)
        ]
        if device.type != "cpu":
            sets = [[[t.abs() + 0.5 for t in tensors] for tensors in four] for four in sets]
        steps = [torch.ones((), device=device) for _ in range(TENSORS)]
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
    for elements in SINGLE_ELEMENTS if device.type == "cpu" else ():
        tensors = list(zip(*_many((4, elements), device, dtype), strict=True))
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
    if device.type == "cpu":
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


def _random(shape: tuple[int, ...], device: torch.device, dtype: str) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))
