"""All parameters of a group in one flat buffer (PhilJd/contiguous_pytorch_params, 2020)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.optimizer.sgd import SGD

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class ContiguousAdamW(AdamW):
    """AdamW over flat buffers; `implementation` says how these few large tensors are updated."""

    keeps_gradient_views: ClassVar[bool] = True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Move parameters and gradients into flat buffers and update those."""
        from vitsweep.techniques.optimizer.flat_buffer import FlatAdamW

        return FlatAdamW(groups, **self.arguments())

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse shardings under which a rank does not hold whole parameters."""
        yield from super().conflicts(cell)
        yield from flat_buffer_conflicts(self.name, cell, instead="adamw_fused")


@dataclass(frozen=True, kw_only=True)
class ContiguousSGD(SGD):
    """SGD over flat buffers; `implementation` says how these few large tensors are updated."""

    keeps_gradient_views: ClassVar[bool] = True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Move parameters and gradients into flat buffers and update those."""
        from vitsweep.techniques.optimizer.flat_buffer import FlatSGD

        return FlatSGD(groups, **self.arguments())

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse shardings under which a rank does not hold whole parameters."""
        yield from super().conflicts(cell)
        yield from flat_buffer_conflicts(self.name, cell, instead="sgd_foreach")


def flat_buffer_conflicts(name: str, cell: CellSpec, instead: str) -> Iterator[str]:
    """Yield why parameters cannot be views of a flat buffer under a sharding."""
    if cell.sharding.shards_parameters or cell.sharding.shards_optimizer:
        yield (
            f"`optimizer={name}` moves whole parameters into one buffer, but `sharding={cell.sharding.name}` "
            f"lets a rank update slices of them: use `optimizer={instead}`, or `sharding=ddp`."
        )
    if getattr(cell.sharding, "gradient_as_bucket_view", False) is True:
        yield (
            f"`optimizer={name}` keeps gradients in a buffer of its own, and "
            "`sharding.gradient_as_bucket_view=true` puts them into the buckets of DDP: "
            "use `sharding.gradient_as_bucket_view=false`."
        )
