"""Collectives on three ranks, with lengths that three does not divide, equal what one process computes.

With two ranks the next one is the one before, and a sum over both is also a difference of signs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.ranks import on_ranks
from tests.techniques.sequence_parallel.cases import cell
from vitsweep.collectives import primitives
from vitsweep.collectives.parallel_linear import (
    ColumnParallelLinear,
    Replicated,
    RowParallelLinear,
    TokenSharded,
    gather_from_sequence_parallel,
    gather_replicated,
    scatter_to_sequence_parallel,
)
from vitsweep.collectives.resharding import gather, split, switch, to_heads, to_tokens
from vitsweep.world import World

RANKS, TOKENS = 3, 7
"""Three tokens on each rank, the last two of them padding."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def of_all(*shape: int, seed: int = 0) -> list[Tensor]:
    """What each rank draws, as every rank knows it."""
    return [drawn(*shape, seed=100 * seed + rank) for rank in range(RANKS)]


class Differences:
    """The names of answers that are not the reference's."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, name: str, answer: Tensor, reference: Tensor) -> None:
        if answer.shape != reference.shape or not torch.allclose(answer, reference):
            self.found.append(f"{name}: {answer} is not {reference}")


def without_gradients(world: World) -> list[str]:
    group, rank = world.axis("replicate").get_group(), world.rank
    differences = Differences()
    check = differences.check
    all_x = of_all(3, 6, 9)
    x = all_x[rank]
    for axis in range(3):
        joined = primitives.all_gather(x, axis, group)
        check(f"all_gather {axis}", joined, torch.cat(all_x, axis))
        own = primitives.reduce_scatter(x, axis, group)
        check(f"reduce_scatter {axis}", own, sum(all_x).chunk(RANKS, axis)[rank])  # type: ignore[union-attr]
        for other in range(3):
            arrived = primitives.all_to_all(x, axis, other, group)
            wanted = torch.cat([each.chunk(RANKS, axis)[rank] for each in all_x], other)
            check(f"all_to_all {axis} {other}", arrived, wanted)
    check("sum", primitives.start_sum(x.clone(), group)(), sum(all_x))  # type: ignore[arg-type]
    check("ring", primitives.RingPass(x.mT, group).arrived(), all_x[rank - 1].mT)
    several = [x.clone(), x[0].float(), x[1].clone()]
    primitives.sum_together(several, group, "gradient")
    check("sum_together", several[0], sum(all_x))  # type: ignore[arg-type]
    check("sum_together float32", several[1], sum(each[0].float() for each in all_x))  # type: ignore[arg-type]
    several = [x.clone(), x[0].float()]
    primitives.broadcast_together(several, group)
    check("broadcast_together", several[0], all_x[0])
    check("broadcast_together float32", several[1], all_x[0][0].float())
    own = torch.empty(54, dtype=torch.float64)
    primitives.start_mean_scatter(x.flatten().clone(), own, group).wait()
    check("mean_scatter", own, sum(all_x)[rank].flatten() / RANKS)  # type: ignore[index]
    whole = x.flatten().clone()
    primitives.start_part_gather(whole, group).wait()
    check("part_gather", whole, torch.cat([each[i].flatten() for i, each in enumerate(all_x)]))
    return differences.found


def with_gradients(world: World) -> list[str]:
    """Each loss weighs what comes out, with weights of the rank's own where ranks hold their own parts."""
    group, rank = world.axis("replicate").get_group(), world.rank
    differences = Differences()
    _reshard(group, differences.check)
    _megatron(group, rank, differences.check)
    _heads(group, rank, differences.check)
    for boundary in (Replicated(group), TokenSharded(group, 1, TOKENS)):
        _linears(boundary, rank, differences.check)
    return differences.found


Check = Callable[[str, Tensor, Tensor], None]


def _part(x: Tensor, axis: int, rank: int) -> Tensor:
    return primitives.pad(x, axis, RANKS).chunk(RANKS, axis)[rank]


def _reshard(group: ProcessGroup, check: Check) -> None:
    """A weight before, within and after the sharded part: the mean of its gradients is the whole one's."""
    x, weights = drawn(2, TOKENS, 6), drawn(3, 6, seed=1)

    def out(sharded: bool, w: Tensor) -> Tensor:
        y = x * w[0]
        if sharded:
            y = split(y, 1, group) * w[1]
            y = switch(y, 1, 2, TOKENS, group).cumsum(1)
            y = switch(y, 2, 1, 6, group)
            y = gather(y, 1, TOKENS, group)
        else:
            y = (y * w[1]).cumsum(1)
        return (y * w[2]).sin()

    both = []
    for sharded in (True, False):
        w = weights.clone().requires_grad_()
        y = out(sharded, w)
        (y * drawn(2, TOKENS, 6, seed=2)).sum().backward()
        both.append((y.detach(), w.grad))
    (y, gradient), (wanted, wanted_gradient) = both
    check("resharded", y, wanted)
    primitives.sum_together([gradient], group, "gradient")
    check("gradient of what is resharded", gradient / RANKS, wanted_gradient)


def _megatron(group: ProcessGroup, rank: int, check: Check) -> None:
    weights, all_x = of_all(2, 9, 4, seed=3), of_all(2, 3, 4, seed=4)
    own = all_x[rank].clone().requires_grad_()
    y = gather_from_sequence_parallel(own, 1, group)
    check("gather_from_sequence_parallel", y, torch.cat(all_x, 1))
    (y * weights[rank]).sum().backward()
    check("its gradient", own.grad, _part(sum(weights), 1, rank))  # type: ignore[arg-type]
    own.grad = None
    (gather_replicated(own, 1, group) * weights[0]).sum().backward()
    check("gradient of gather_replicated", own.grad, _part(weights[0], 1, rank))
    whole = drawn(2, TOKENS, 4).requires_grad_()
    y = scatter_to_sequence_parallel(whole, 1, group)
    check("scatter_to_sequence_parallel", y, _part(whole, 1, rank))
    (y * weights[rank][:, :3]).sum().backward()
    joined = torch.cat([each[:, :3] for each in weights], 1)[:, :TOKENS]
    check("its gradient", whole.grad, joined)


def _heads(group: ProcessGroup, rank: int, check: Check) -> None:
    """q, k and v to heads, a causal sum over all tokens, and back."""
    for outermost in (True, False):
        whole = [drawn(2, 6, TOKENS, 5, seed=s) for s in range(3)]
        own = [_part(x, 2, rank).clone().requires_grad_() for x in whole]
        if outermost:
            own = [x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in own]
            own = [x.requires_grad_() for x in own]
        three = to_heads(*own, TOKENS, group)
        for name, x, all_of_it in zip("qkv", three, whole, strict=True):
            check(f"{name} to heads", x, all_of_it.chunk(RANKS, 1)[rank])
        weight = primitives.pad(drawn(2, 6, TOKENS, 5, seed=5), 2, RANKS)
        y = to_tokens((three[0] * three[1] + three[2]).cumsum(2), group, outermost)
        (y * _part(weight, 2, rank)).sum().backward()
        for x in whole:
            x.requires_grad_()
        wanted = (whole[0] * whole[1] + whole[2]).cumsum(2)
        check("to tokens", y, _part(wanted, 2, rank))
        (wanted * weight[:, :, :TOKENS]).sum().backward()
        for name, x, all_of_it in zip("qkv", own, whole, strict=True):
            check(f"gradient of {name}", x.grad, _part(all_of_it.grad, 2, rank))


def _linears(boundary: Any, rank: int, check: Check) -> None:
    """Two fused matrices split by columns, then one by rows, against the same two linears whole."""
    sharded, what = isinstance(boundary, TokenSharded), type(boundary).__name__
    first, second = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
    for i, parameter in enumerate([*first.parameters(), *second.parameters()]):
        parameter.data = drawn(*parameter.shape, seed=10 + i)
    columns, rows = nn.Linear(4, 12), nn.Linear(6, 4)
    for linear, like, kind, parts in (
        (columns, first, ColumnParallelLinear, 2),
        (rows, second, RowParallelLinear, 1),
    ):
        linear.weight, linear.bias = (nn.Parameter(p.detach().clone()) for p in like.parameters())
        linear.__class__ = kind
        linear.take(boundary, parts)  # type: ignore[operator]
    whole = drawn(2, TOKENS, 4, seed=20).requires_grad_()
    x = (_part(whole, 1, rank) if sharded else whole).detach().clone().requires_grad_()
    weight = primitives.pad(drawn(2, TOKENS, 4, seed=21), 1, RANKS)

    def product(x: Tensor, columns: nn.Module, rows: nn.Module) -> Tensor:
        a, b = columns(x).chunk(2, -1)
        return rows(F.silu(a) * b)

    wanted, y = product(whole, first, second), product(x, columns, rows)
    kept = (
        primitives.unpadded_length(TOKENS, 3, rank) if sharded else TOKENS
    )  # bias is on padding too
    part = _part(wanted, 1, rank)[:, :kept] if sharded else wanted
    check(f"{what}: product", y[:, :kept], part)
    (wanted * weight[:, :TOKENS]).sum().backward()
    (y * (_part(weight, 1, rank) if sharded else weight[:, :TOKENS])).sum().backward()
    check(f"{what}: gradient", x.grad, _part(whole.grad, 1, rank) if sharded else whole.grad)
    for linear, like in ((columns, first), (rows, second)):
        for name, parameter in like.named_parameters():
            own = getattr(linear, name).grad
            for b in linear.blocks(name):  # type: ignore[operator]
                part = own.narrow(b.axis, b.in_part, b.length)
                check(
                    f"{what}: gradient of {name}",
                    part,
                    parameter.grad.narrow(b.axis, b.in_whole, b.length),
                )


def test_they_equal_one_process(tmp_path: Path) -> None:
    spec = cell(RANKS, "batch.images_per_step=9")
    for found in on_ranks(RANKS, both, spec, folder=tmp_path, seconds=60):
        assert found == []


def both(world: World) -> list[str]:
    return without_gradients(world) + with_gradients(world)
