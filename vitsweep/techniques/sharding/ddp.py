"""Distributed data parallel: full replicas, gradients averaged by all-reduce during backward."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from annotated_types import Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan, Sharding

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from vitsweep.world import World


HALF_GRADIENTS = 1e-2
"""How far the loss of a short training may lie from that with float32 gradients (see `proof`)."""
TWIN_BUCKET_MIB = 0.125
"""A nano twin has some 40,000 parameters: three buckets in float64, two in float32."""
LEAST_COMPILED_MIB = 1
"""Of a bucket where torch.compile cuts graphs (`DDPOptimizer`): the first bucket of DDP."""


@dataclass(frozen=True, kw_only=True)
class BucketedReplicas(Sharding):
    """Every rank holds all parameters; gradients are exchanged in buckets during the backward pass.

    Attributes:
        bucket_mib: size of a bucket.
        gradient_dtype: in which gradients are exchanged; None leaves them as they are.
    """

    bucket_mib: Annotated[float, Gt(0)]
    gradient_dtype: Literal["bfloat16"] | None

    def of_twin(self) -> Self:
        """Exchange the gradients of a nano model in several buckets."""
        return replace(self, bucket_mib=min(self.bucket_mib, TWIN_BUCKET_MIB))

    def relative_tolerance(self) -> float:
        """Gradients in bfloat16 keep 8 bits of mantissa."""
        return HALF_GRADIENTS if self.gradient_dtype else 0.0

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dtype for gradients that are half precision anyway."""
        if self.gradient_dtype is not None:
            yield from half_gradient_conflicts(self, self.gradient_dtype, cell)


@dataclass(frozen=True, kw_only=True)
class Ddp(BucketedReplicas):
    """torch's DistributedDataParallel.

    Attributes:
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them; resolved
            from auto: false only where the optimizer keeps gradients in a buffer of its own.
        static_graph: promise that every step uses the same parameters in the same order.
    """

    gradient_as_bucket_view: bool
    static_graph: bool

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Wrap the model."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from vitsweep.collectives.primitives import view_like

        # torch.compile cuts a model under DDP into a graph per bucket, so that gradients are
        # exchanged early. Alone, there is nothing to exchange.
        torch._dynamo.config.optimize_ddp = world.shape.gradient_shares > 1
        if not self.gradient_as_bucket_view:
            # Buckets keep strides, which parameters lose that an optimizer moves into a buffer later.
            for p in [p for p in model.parameters() if not p.is_contiguous()]:
                p.data = view_like(p.data.new_empty(p.numel()), p, 0).copy_(p.data)
        looks = not self.static_graph and getattr(model, "may_lack_gradients", False)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            process_group=world.gradient_group(),
            bucket_cap_mb=self.bucket_mib,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            find_unused_parameters=looks,
        )
        if looks:
            _take_warning(wrapped)
        if self.gradient_dtype and world.shape.gradient_shares > 1:
            _exchange_in(getattr(torch, self.gradient_dtype), wrapped, world.gradient_group())
        return wrapped

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Skip the all-reduce for all but the last micro-batch."""
        if is_last_micro_batch:
            return nullcontext()
        return cast("DistributedDataParallel", model).no_sync()

    def drop_gradients(self, model: "nn.Module") -> None:
        """Let the reducer forget a backward pass that it waits for (private to torch)."""
        cast("DistributedDataParallel", model).reducer._reset_state()

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a static graph with gradient accumulation: DDP's `no_sync` changes the graph."""
        yield from super().conflicts(cell)
        if self.static_graph and cell.batch.accumulation_steps > 1:
            yield (
                f"`sharding.static_graph=true` does not allow "
                f"`batch.accumulation_steps={cell.batch.accumulation_steps}`: set it to false."
            )
        cuts = cell.compilation.scope != "nothing" and cell.mesh.gradient_shares > 1
        if cuts and self.bucket_mib < LEAST_COMPILED_MIB:
            yield (
                f"`sharding.bucket_mib={self.bucket_mib:g}` with `compilation={cell.compilation.name}` is "
                f"refused by torch's compiler, whose buckets have {LEAST_COMPILED_MIB} MiB at least: use "
                f"`sharding.bucket_mib={LEAST_COMPILED_MIB}`, or `compilation=eager`."
            )


def half_gradient_conflicts(
    sharding: Sharding, gradient_dtype: str, cell: CellSpec
) -> Iterator[str]:
    """Refuse a dtype for gradients that no other rank needs, or that are half precision anyway."""
    plan, ranks = cell.precision.plan(), cell.mesh.gradient_shares
    held = "float32" if sharding.shards_parameters and plan.master_weights else plan.param_dtype
    if ranks == 1 or held in ("float16", "bfloat16"):
        yield (
            f"`sharding.gradient_dtype={gradient_dtype}` halves what ranks exchange in float32, and "
            f"`sharding={sharding.name}` with `precision={cell.precision.name}` exchanges nothing in float32 "
            f"over {ranks} of them: use `sharding.gradient_dtype=null`."
        )


def _take_warning(wrapped: "DistributedDataParallel") -> None:
    """Let DDP warn now, unseen, that a pass uses all parameters: it does so once in a process.

    The warning is for those who look for unused parameters by mistake. It comes from C++, whose warnings
    are Python's inside of an autograd function alone, and the step that is searched here ends at once.
    """
    import warnings

    from torch.autograd import Function

    class Search(Function):
        @staticmethod
        def forward(ctx: Any, outputs: "list[torch.Tensor]") -> None:
            wrapped.reducer.prepare_for_backward(outputs)

    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    with warnings.catch_warnings(action="ignore"):
        Search.apply([p.flatten()[:1] for p in parameters])
    wrapped.reducer._reset_state()


def _exchange_in(
    dtype: "torch.dtype", wrapped: "DistributedDataParallel", group: "ProcessGroup | None"
) -> None:
    """Let the gradients of a wrapped model be averaged in `dtype`, and the means be copied back.

    What torch's `bf16_compress_hook` does, which refuses to be registered without NCCL.

    Args:
        dtype: in which gradients are summed.
        wrapped: by DDP.
        group: ranks whose gradients are averaged; None stands for all.
    """
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.futures import Future

    def exchanged(dtype: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
        whole = bucket.buffer()
        # Divided before it is summed, so that the sum of many ranks stays in range.
        sent = whole.to(dtype).div_(dist.get_world_size(group))
        work: Any = dist.all_reduce(sent, group=group, async_op=True)
        future: Future[Tensor] = work.get_future().then(lambda _: whole.copy_(sent))
        return future

    wrapped.register_comm_hook(dtype, exchanged)
