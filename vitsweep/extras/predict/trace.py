"""Trace one training step of a cell on fake tensors: what it computes, sends and keeps (needs torch)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import lcm, prod
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from vitsweep.extras.predict.fake_world import Replica, fake_world, float32_layer_norm
from vitsweep.extras.predict.recorder import Recorder
from vitsweep.extras.predict.step_time import (
    CollectiveTotal,
    OperatorTotal,
    StepTrace,
    memory_parts,
)
from vitsweep.measure.memory import optimizer_tensors
from vitsweep.model.build import build_model
from vitsweep.model.module_look import as_it_was
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import example_of
from vitsweep.objectives.base import OpenObjective
from vitsweep.parallelize import parallelize
from vitsweep.planning.closed_memory import MemoryParts
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import axis_lengths
from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.techniques.pipeline_parallel.runner import PipelineRunner
from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica
from vitsweep.training.trainer import Trainer

# From the steps of two shallow models to that of a deep one of equal blocks (no torch).

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

    operators = _operators(few.operators, more.operators, linear)
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


Linear = Callable[[float, float], float]
"""From figures of the two depths to that of the model's."""
Rows = TypeVar("Rows", OperatorTotal, CollectiveTotal)


def _operators(
    few: Sequence[OperatorTotal], more: Sequence[OperatorTotal], linear: Linear
) -> tuple[OperatorTotal, ...]:
    def is_batch(total: OperatorTotal) -> bool:  # of an optimizer, over the matrices of all blocks
        return total.phase == "optimizer" and total.kind == "matmul"

    def alike(total: OperatorTotal) -> tuple[Any, ...]:
        sides = total.shape[1:] if is_batch(total) else ()
        return total.kind, total.name, total.phase, total.dtype, len(total.shape), sides

    found = []
    groups = _together(few, more, alike, lambda o: () if is_batch(o) else o.shape)
    for rows in (each for sides in groups for each in _in_order(*sides)):
        sums: dict[str, Any] = {
            n: round(_sum(rows, n, linear)) for n in ("count", "flops", "bytes_moved")
        }
        one, *_ = rows[1] or rows[0]
        lengths = [
            linear(*(sum(r.shape[axis] * r.count for r in side) for side in rows))
            for axis in range(len(one.shape))
        ]
        shape = tuple(max(1, round(length / max(1, sums["count"]))) for length in lengths)
        found.append(replace(one, shape=shape, **sums))
    return tuple(found)


def _collectives(
    few: Sequence[CollectiveTotal], more: Sequence[CollectiveTotal], linear: Linear
) -> tuple[CollectiveTotal, ...]:
    def alike(c: CollectiveTotal) -> tuple[Any, ...]:
        return c.name, c.purpose, c.phase, c.group_ranks, c.group_nodes

    found = []
    for rows in _together(few, more, alike, lambda c: c.bytes_whole):
        count = max(1, round(_sum(rows, "count", linear)))
        whole = linear(*(sum(r.bytes_whole * r.count for r in side) for side in rows))
        sent = _sum(rows, "bytes_sent", linear)
        one, *_ = rows[1] or rows[0]
        found.append(replace(one, count=count, bytes_whole=round(whole / count), bytes_sent=sent))
    return tuple(found)


def _together(
    few: Sequence[Rows],
    more: Sequence[Rows],
    alike: Callable[[Rows], Any],
    size: Callable[[Rows], Any],
) -> Iterable[tuple[list[Rows], list[Rows]]]:
    """Return rows that are extrapolated together: those of equal size; of the others all that are alike."""
    both = set.intersection(*({(alike(row), size(row)) for row in rows} for rows in (few, more)))
    groups: dict[Any, tuple[list[Rows], list[Rows]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((few, more)):
        for row in rows:
            key = alike(row), size(row)
            groups[key if key in both else key[0]][side].append(row)
    return groups.values()


def _in_order(
    few: list[OperatorTotal], more: list[OperatorTotal]
) -> list[tuple[list[OperatorTotal], list[OperatorTotal]]]:
    """Pair lists of tensors, which are longer in the deeper model, by their order; as they are if more."""
    if len(few) != len(more):
        return [(few, more)]
    ordered = (sorted(rows, key=lambda total: total.shape) for rows in (few, more))
    return [([a], [b]) for a, b in zip(*ordered, strict=True)]


def _sum(rows: tuple[list[Rows], list[Rows]], name: str, linear: Linear) -> float:
    return linear(*(sum(getattr(row, name) for row in side) for side in rows))


CPU = torch.device("cpu")
"""Fake tensors lie here whatever the cell's device: torch's CPU build has no fake CUDA tensors."""


@as_it_was()
def trace_cell(cell: CellSpec) -> StepTrace:
    """Trace the rank of a cell that has most to do.

    A transformer of many equal blocks is traced with few of them: operators, bytes sent and memory
    are linear in the depth (`extrapolate`). Of a pipeline the first, the second and the last
    stage are traced.

    Returns:
        Operators and collectives of the rank with the most FLOPs; its memory, or that of another
        traced rank whose peak is higher.

    Raises:
        Exception: whatever building the model or the step raises.
    """
    depths = traced_depths(cell)
    traces = [
        extrapolate(
            [trace_rank(replace(cell, model=replace(cell.model, depth=d)), rank) for d in depths],  # type: ignore[call-arg]
            depths,
            cell.transformer.depth,
        )
        if depths
        else trace_rank(cell, rank)
        for rank in distinct_ranks(cell)
    ]
    busiest = max(traces, key=lambda trace: trace.flops_per_step)
    fullest = max(traces, key=lambda trace: trace.memory.peak)
    return replace(busiest, memory=fullest.memory)


def distinct_ranks(cell: CellSpec) -> list[int]:
    """Ranks that do different work: stages of a pipeline, the ends of a ring with a causal mask."""
    mesh = cell.mesh
    per_stage = mesh.world_size // mesh.pipeline
    ranks = {0, min(1, mesh.pipeline - 1) * per_stage, (mesh.pipeline - 1) * per_stage}
    if mesh.sequence_parallel_size > 1:
        ranks.add(mesh.sequence_parallel_size * mesh.tensor - 1)
    return sorted(ranks)


def trace_rank(cell: CellSpec, rank: int) -> StepTrace:
    """Trace all blocks of one rank; the second step, in which the optimizer has its state."""
    device, compiled = cell.resources.device, cell.compilation.scope
    cell, notes = traceable(cell)
    model_spec, example = cell.model, None
    if isinstance(model_spec, ModuleSpec):  # its values are read before tensors are fake
        example = example_of(model_spec, 1, cell.batch.resolution_px)
    with fake_world(cell, CPU, rank) as world:
        recorder = Recorder(cell.resources.ranks_per_node, device)
        with _without_values(cell), recorder:
            torch.manual_seed(cell.seed)
            with torch.device("meta"):
                model = build_model(cell)
            num_parameters = sum(p.numel() for p in model.parameters())
            trainer = parallelize(model, cell, world)
            micro_batches = [
                _micro_batch(cell, trainer.objective, example)
            ] * cell.batch.accumulation_steps
            trainer.step(iter(micro_batches), recorder)
            held = _Held(trainer, recorder, micro_batches[0])
            recorder.clear()
            trainer.step(iter(micro_batches), held)
    operators, peaks = recorder.operators(), recorder.peaks()
    return StepTrace(
        operators=operators,
        collectives=recorder.collectives(),
        memory=held.memory(peaks),
        dispatches=dict(recorder.dispatches),
        parameters=num_parameters,
        flops_per_step=sum(operator.flops for operator in operators),
        device=device,
        pipeline_ranks=cell.mesh.pipeline,
        pipeline_chunks=cell.pipeline_parallel.microbatches,
        compiled=compiled,
        notes=notes,
        peaks=peaks,
    )


def traceable(cell: CellSpec) -> tuple[CellSpec, tuple[str, ...]]:
    """Replace choices that cannot be traced; return the cell, and one sentence per replacement."""
    found = {group: choice.trace_substitute() for group, choice in cell.techniques.items()}
    substitutes: dict[str, Any] = {group: choice for group, (choice, _) in found.items()}
    return replace(cell, **substitutes), tuple(note for _, note in found.values() if note)


def _micro_batch(cell: CellSpec, objective: OpenObjective, example: Any) -> Any:
    if isinstance(example, Mapping):
        return {
            name: torch.zeros(cell.micro_batch, *part.shape[1:], dtype=part.dtype)
            for name, part in example.items()
        }
    return objective.example(cell.micro_batch, torch.Generator())


class _Held:
    """Says what the tensors of a trainer are, and measures them; passes on the marks of the step."""

    def __init__(self, trainer: Trainer, recorder: Recorder, batch: Any) -> None:
        self._recorder, self._gradients = recorder, 0
        self._parameters = list(trainer.model.parameters())
        self._optimizer_tensors = list(optimizer_tensors(trainer))
        self._buffers = [*tree_leaves(batch), *trainer.model.buffers()]
        for module in trainer.model.modules():
            if isinstance(module, Replica) and module.gradient_as_bucket_view:
                recorder.hold(module.buckets, "gradients")
            elif isinstance(module, Replica):
                self._buffers += module.buckets
            if isinstance(module, ShardedReplica):
                self._buffers += [
                    b._own for b in module.buckets if trainer.cell.mesh.gradient_shares > 1
                ]
            if isinstance(module, FSDPModule):
                _hold_gathered(module, recorder)
        for parameter in self._parameters:
            recorder.hold([parameter.grad], "gradients")  # kept between steps by flat buffers
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hold_gradient)
        recorder.hold(self._optimizer_tensors, "optimizer")
        recorder.hold(self._parameters, "parameters")
        recorder.hold(self._buffers, "buffers")

    def end(self, mark: str) -> None:
        """A phase of the step ends."""
        self._recorder.end(mark)
        if mark == "backward":
            self._gradients = _bytes(p.grad for p in self._parameters)

    def memory(self, peaks: dict[str, dict[str, int]]) -> MemoryParts:
        """Return the parts after the step."""
        return memory_parts(
            peaks,
            parameters=_bytes(self._parameters),
            gradients=self._gradients,
            optimizer=_bytes(self._optimizer_tensors),
            buffers=_bytes(self._buffers),
        )

    def _hold_gradient(self, parameter: Tensor) -> None:
        self._recorder.hold([parameter.grad], "gradients")


def _hold_gathered(module: nn.Module, recorder: Recorder) -> None:
    """Name what FSDP2 gathers and the gradients before they are scattered (private to torch)."""
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    for parameter in group.fsdp_params if group else ():
        recorder.hold(parameter.all_gather_outputs, "gathered")
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.requires_grad:
            whole.register_post_accumulate_grad_hook(lambda p: recorder.hold([p.grad], "gradients"))


def _bytes(tensors: Any) -> int:
    """Bytes of tensors, of this rank's parts of those that are sharded."""
    local = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return sum(t.nbytes for t in local)


@contextmanager
def _without_values(cell: CellSpec) -> Iterator[None]:
    """Replace what needs the values of tensors, or another device than the one that fakes it."""
    with ExitStack() as stack:
        stack.enter_context(patch("vitsweep.model.initialize.draw_weights", lambda model: None))
        stack.enter_context(patch.object(PipelineRunner, "_between_stages", _borders(cell)))
        if cell.resources.device == "cuda" and cell.precision.plan().autocast_dtype:
            stack.enter_context(float32_layer_norm())
        yield


def _borders(cell: CellSpec) -> Callable[..., list[Tensor]]:
    """Return what finds the tensors between stages without sending them: (B, T, D) everywhere."""

    def between_stages(runner: PipelineRunner, images: Tensor) -> list[Tensor]:
        dtype = getattr(torch, cell.precision.plan().param_dtype)
        width, tokens = cell.transformer.width, cell.sequence_parallel.tokens_per_rank(cell)
        columns = axis_lengths(cell)[1:]
        found = [images]
        for stage in range(1, runner._ranks):
            shared = tokens[stage * len(tokens) // runner._ranks - 1]
            axes = (len(images), shared // prod(columns), *columns)
            if not cell.layout.batch_first:
                axes = (shared, len(images))
            found.append(torch.empty(*axes, width, dtype=dtype, device=images.device))
        return (
            [*found, runner.stage(found[-1])]
            if runner._rank == runner._ranks - 1
            else [*found, torch.empty(0, device=images.device)]
        )

    return between_stages
