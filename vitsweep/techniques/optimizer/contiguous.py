"""All parameters of a group in one flat buffer (PhilJd/contiguous_pytorch_params, 2020)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.optimizer.sgd import SGD

if TYPE_CHECKING:
    from torch.optim import Optimizer


class _Flat(OptimizerChoice):
    keeps_gradient_views: ClassVar[bool] = True

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse shardings under which a rank does not hold whole parameters and gradients of its own."""
        yield from super().conflicts(cell)
        if cell.sharding.shards_parameters or cell.sharding.shards_optimizer:
            yield (
                f"`optimizer={self.name}` moves whole parameters into one buffer, but `sharding="
                f"{cell.sharding.name}` lets a rank update slices of them: use `optimizer={self.instead}`, "
                "or `sharding=ddp`."
            )
        if getattr(cell.sharding, "gradient_as_bucket_view", False) is True:
            yield (
                f"`optimizer={self.name}` keeps gradients in a buffer of its own, and "
                "`sharding.gradient_as_bucket_view=true` puts them into the buckets of DDP: "
                "use `sharding.gradient_as_bucket_view=false`."
            )


@dataclass(frozen=True, kw_only=True)
class ContiguousAdamW(_Flat, AdamW):
    """AdamW over flat buffers; `implementation` says how these few large tensors are updated."""

    instead: ClassVar[str] = "adamw_foreach"

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Move parameters and gradients into flat buffers and update those."""
        from vitsweep.techniques.optimizer.flat_buffer import FlatAdamW

        return FlatAdamW(groups, **self.arguments())


@dataclass(frozen=True, kw_only=True)
class ContiguousSGD(_Flat, SGD):
    """SGD over flat buffers; `implementation` says how these few large tensors are updated."""

    instead: ClassVar[str] = "sgd_foreach"

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Move parameters and gradients into flat buffers and update those."""
        from vitsweep.techniques.optimizer.flat_buffer import FlatSGD

        return FlatSGD(groups, **self.arguments())
