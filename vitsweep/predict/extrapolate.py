"""From the steps of two shallow models to that of a deep one of equal blocks (no torch)."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from vitsweep.predict.step_trace import (
    CollectiveTotal,
    OperatorTotal,
    StepTrace,
    memory_parts,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import TransformerSpec

AXES = 2
"""Blocks of a model with two axes of tokens take turns: depths differ by as many."""


def traced_depths(cell: CellSpec) -> tuple[int, int] | None:
    """Return the depths that stand for the cell's own, or None where it is traced as it is.

    Both hold whole units of FSDP, and more of them than are gathered ahead. A cell is traced as it is
    where it has no equal blocks, one that is shallow anyway, a pipeline, whose ranks hold
    few blocks, and ZeRO-1, which cuts buckets of many tensors into parts.
    """
    if not isinstance(cell.model, TransformerSpec) or cell.mesh.pipeline > 1:
        return None
    if cell.sharding.shards_optimizer and cell.mesh.gradient_shares > 1:
        return None
    unit = getattr(cell.sharding, "blocks_per_unit", 1)
    ahead = max(getattr(cell.sharding, f"prefetch_{way}", 0) for way in ("forward", "backward"))
    period = lcm(AXES, unit)
    first = period * (1 + ahead * unit // AXES) + cell.model.depth % period
    return (first, first + period) if cell.model.depth > first + period else None


def extrapolate(traces: Sequence[StepTrace], depths: tuple[int, int], depth: int) -> StepTrace:
    """Return the step of a model of `depth` blocks.

    Counts, FLOPs and bytes are linear in the depth. So are the bytes alive at the peak of each half
    of a phase, of which the largest is the peak of the step. Lists of tensors (fused optimizers,
    buckets of gradients) become longer, or more.

    Args:
        traces: of models of `depths` blocks.
        depths: of these.
        depth: of the model.
    """
    few, more = traces

    def linear(a: float, b: float) -> float:
        return a + (b - a) * (depth - depths[0]) / (depths[1] - depths[0])

    def whole(a: int, b: int) -> int:
        return round(linear(a, b))

    operators = _operators(few.operators, more.operators, whole)
    peaks = {
        segment: {
            kind: whole(few.peaks[segment].get(kind, 0), more.peaks[segment].get(kind, 0))
            for kind in {**few.peaks[segment], **more.peaks[segment]}
        }
        for segment in more.peaks
    }
    held = {
        part: whole(getattr(few.memory, part), getattr(more.memory, part))
        for part in ("parameters", "gradients", "optimizer", "buffers")
    }
    return replace(
        more,
        operators=operators,
        collectives=_collectives(few.collectives, more.collectives, linear),
        memory=memory_parts(peaks, **held),
        dispatches={p: whole(few.dispatches[p], more.dispatches[p]) for p in more.dispatches},
        parameters=whole(few.parameters, more.parameters),
        flops_per_step=sum(operator.flops for operator in operators),
        peaks=peaks,
    )


def _operators(
    few: Iterable[OperatorTotal],
    more: Iterable[OperatorTotal],
    whole: Callable[[int, int], int],
) -> tuple[OperatorTotal, ...]:
    def alike(total: OperatorTotal) -> Hashable:
        return total.kind, total.name, total.phase, total.dtype, len(total.shape)

    return tuple(
        replace(
            b,
            shape=tuple(whole(x, y) for x, y in zip(a.shape, b.shape, strict=True)),
            **{n: whole(getattr(a, n), getattr(b, n)) for n in ("count", "flops", "bytes_moved")},
        )
        for a, b in _pairs(few, more, alike, lambda total: total.shape, _none_of_operator)
    )


def _collectives(
    few: Sequence[CollectiveTotal],
    more: Sequence[CollectiveTotal],
    linear: Callable[[float, float], float],
) -> tuple[CollectiveTotal, ...]:
    """Extrapolate calls of equal size one by one; calls of other sizes (buckets) all together."""

    def alike(c: CollectiveTotal) -> Hashable:
        return c.name, c.purpose, c.phase, c.axis, c.group_ranks, c.group_nodes

    groups: dict[Hashable, tuple[list[CollectiveTotal], list[CollectiveTotal]]] = {}
    for side, rows in enumerate((few, more)):
        for row in rows:
            groups.setdefault(alike(row), ([], []))[side].append(row)
    found = []
    for sides in groups.values():
        sizes = [{row.bytes_whole for row in rows} for rows in sides]
        if sizes[0] == sizes[1]:
            left, right = ({row.bytes_whole: row for row in rows} for rows in sides)
            found += [_together([left[size]], [right[size]], linear) for size in left]
        else:
            found.append(_together(*sides, linear))
    return tuple(found)


def _together(
    few: Sequence[CollectiveTotal],
    more: Sequence[CollectiveTotal],
    linear: Callable[[float, float], float],
) -> CollectiveTotal:
    count = max(1, round(linear(sum(c.count for c in few), sum(c.count for c in more))))
    whole = linear(*(sum(c.bytes_whole * c.count for c in rows) for rows in (few, more)))
    sent = linear(*(sum(c.bytes_sent for c in rows) for rows in (few, more)))
    return replace((*more, *few)[0], count=count, bytes_whole=round(whole / count), bytes_sent=sent)


def _pairs(
    few: Iterable[Any],
    more: Iterable[Any],
    alike: Callable[[Any], Hashable],
    size: Callable[[Any], tuple[int, ...]],
    none_of: Callable[[Any], Any],
) -> list[tuple[Any, Any]]:
    """Pair rows of equal size; of the others, rows that are alike by the order of their sizes.

    A row that is left alone is paired with none of its calls.
    """
    groups: dict[Hashable, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((few, more)):
        for row in rows:
            groups[alike(row)][side].append(row)
    pairs = []
    for left, right in groups.values():
        sizes = {size(a): a for a in left}
        same = [(sizes[size(b)], b) for b in right if size(b) in sizes]
        pairs += same
        common = {size(a) for a, _ in same}
        rest = [
            sorted((r for r in rows if size(r) not in common), key=size) for rows in (left, right)
        ]
        shorter = min(map(len, rest))
        pairs += zip(rest[0][:shorter], rest[1][:shorter], strict=True)
        pairs += [(a, none_of(a)) for a in rest[0][shorter:]]
        pairs += [(none_of(b), b) for b in rest[1][shorter:]]
    return pairs


def _none_of_operator(total: OperatorTotal) -> OperatorTotal:
    return replace(total, count=0, flops=0, bytes_moved=0)
