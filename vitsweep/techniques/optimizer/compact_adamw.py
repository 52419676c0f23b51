"""AdamW whose state takes 8, 4 or 16 bits per number, by torchao."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from vitsweep.console import TORCHAO_IMPORT, quiet_loggers
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice, Technique
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.torch_compat import torchao_refusal

if TYPE_CHECKING:
    from torch.optim import Optimizer

BLOCKS = {"int8": 256, "int4": 128}
"""Numbers of a tensor that share a scale (torchao's defaults)."""


@dataclass(frozen=True, kw_only=True)
class CompactAdamW(OptimizerChoice):
    """AdamW that computes in float32 and keeps its two moments in fewer bits.

    `int8`: blocks of 256 numbers with a scale each and a non-linear code (Dettmers et al.,
    arXiv:2110.02861); `int4`: blocks of 128 (Li et al., arXiv:2309.01507); `bfloat16`: rounded.
    Tensors of fewer than 4,096 numbers, or of a length that blocks do not divide, stay as they are.
    Memory of the state: a quarter, an eighth or half of AdamW's 8 bytes per parameter. Bytes sent and
    FLOPs do not change. Published for ViT-H by torchao: 12.23 -> 8.33 GB at the same speed.

    Attributes:
        beta1: decay of the mean gradient.
        beta2: decay of the mean squared gradient.
        eps: added to the root of the latter.
        state: number format of both moments.
        stochastic_rounding: round updated bfloat16 weights up or down at random, so that updates
            smaller than their last digit count on average.
        compiled: fuse the update of a tensor into one kernel (`torch.compile`, once per shape).
    """

    beta1: Annotated[float, Ge(0), Lt(1)]
    beta2: Annotated[float, Ge(0), Lt(1)]
    eps: Annotated[float, Gt(0)]
    state: Literal["int8", "int4", "bfloat16"]
    stochastic_rounding: bool
    compiled: bool

    compilable: ClassVar[bool] = False

    def trace_substitute(self) -> tuple[Technique, str]:
        """The update without a compiler."""
        if not self.compiled:
            return self, ""
        return replace(self, compiled=False), (
            f"`optimizer={self.name}` is counted as the update without a compiler, which passes "
            "over memory once per operation."
        )

    def relative_tolerance(self) -> float:
        """How far rounding the state may move the loss of a short training."""
        return {"int8": 2e-2, "int4": 5e-2, "bfloat16": 1e-2}[self.state]

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return the optimizer; each group carries its own `weight_decay`."""
        with quiet_loggers(*TORCHAO_IMPORT):
            from vitsweep.techniques.optimizer.compact_update import CompactUpdate

        return CompactUpdate(
            groups,
            self.learning_rate,
            (self.beta1, self.beta2),
            self.eps,
            state=self.state,
            stochastic_rounding=self.stochastic_rounding,
            compiled=self.compiled,
        )

    def plain(self) -> AdamW:
        """Return torch's loop with float32 state; `relative_tolerance` allows for the rounding."""
        shared = ("learning_rate", "weight_decay", "clip_norm", "beta1", "beta2", "eps")
        knobs = {name: getattr(self, name) for name in shared}
        return AdamW(name=self.name, implementation="loop", **knobs)

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a missing torchao, slices without blocks, and rounding of what is not bfloat16."""
        yield from torchao_refusal(f"optimizer={self.name}", "torchao", "optimizer=adamw_fused")
        if self.state in BLOCKS and cell.sharding.shards_optimizer:
            yield (
                f"`optimizer={self.name}` gives blocks of {BLOCKS[self.state]} numbers of a tensor one "
                f"scale, and `sharding={cell.sharding.name}` gives ranks slices of any length, whose "
                "state would stay in float32: use `sharding=fsdp`, whose shards are whole rows, or "
                "`sharding=ddp`."
            )
        if self.stochastic_rounding and _kept_dtype(cell) != "bfloat16":
            yield (
                f"`optimizer.stochastic_rounding=true` rounds bfloat16 weights, and `precision="
                f"{cell.precision.name}` updates {_kept_dtype(cell)} ones: use `precision=bf16_params`."
            )


def _kept_dtype(cell: CellSpec) -> str:
    """Dtype of the weights that the optimizer updates."""
    plan = cell.precision.plan()
    return "float32" if plan.master_weights else plan.param_dtype
