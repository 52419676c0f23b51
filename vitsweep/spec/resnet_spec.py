"""Shapes of residual convolutional networks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from annotated_types import Gt, MinLen

from vitsweep.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

EXPANSION = 4
"""Channels that leave a bottleneck, in widths of its 3x3 convolution (arXiv:1512.03385, table 1)."""


class Convolution(NamedTuple):
    """Shape of one convolution; the module, its parameters and its FLOPs follow from it.

    Attributes:
        inputs: channels that come in.
        outputs: channels that go out.
        kernel_px: side of the filter; half of it, rounded down, is padded on every side.
        stride: the side of what goes out is ceil(side / stride).
    """

    inputs: int
    outputs: int
    kernel_px: int
    stride: int


class BottleneckShape(NamedTuple):
    """1x1, 3x3, 1x1, and a 1x1 on the shortcut where the shape changes."""

    convolutions: tuple[Convolution, Convolution, Convolution]
    shortcut: Convolution | None


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(ModelSpec):
    """A residual network of bottlenecks (He et al., arXiv:1512.03385), in its version 1.5.

    Version 1.5 strides in the 3x3 convolution, not in the 1x1 before it, as torchvision's and
    NVIDIA's do. It has neither tokens nor attention: a convolutional model beside the ViTs. Its
    BatchNorm normalises over the images of one replica's micro-batch (arXiv:1706.02677), so that a
    replica more is another training, not only a faster one.

    Attributes:
        stage_blocks: bottlenecks per stage; every stage after the first halves the side.
        width: channels inside the bottlenecks of the first stage; every stage doubles them.
        stem: `imagenet` is a 7x7 convolution and a max pooling that take the side down to a
            quarter; `small` a 3x3 one that keeps it, for images of a few pixels.
        norm_eps: epsilon of BatchNorm.
    """

    norm_eps: Annotated[float, Gt(0)]
    stage_blocks: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)]
    width: Annotated[int, Gt(0)]
    stem: Literal["imagenet", "small"]
    head: Literal["classify"]

    norms_over_batch: ClassVar[bool] = True

    @property
    def features(self) -> int:
        """Channels that the head reads."""
        return self.width * 2 ** (len(self.stage_blocks) - 1) * EXPANSION

    @property
    def stem_convolution(self) -> Convolution:
        """The first convolution."""
        kernel, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        return Convolution(self.in_channels, self.width, kernel, stride)

    @property
    def bottlenecks(self) -> Iterator[BottleneckShape]:
        """All bottlenecks in their order."""
        inputs = self.width
        for stage, blocks in enumerate(self.stage_blocks):
            inner = self.width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                outputs = inner * EXPANSION
                changes = stride > 1 or inputs != outputs
                yield BottleneckShape(
                    (
                        Convolution(inputs, inner, 1, 1),
                        Convolution(inner, inner, 3, stride),
                        Convolution(inner, outputs, 1, 1),
                    ),
                    Convolution(inputs, outputs, 1, stride) if changes else None,
                )
                inputs = outputs

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image."""
        return (self.in_channels, resolution_px, resolution_px)

    def last_side(self, resolution_px: int) -> int:
        """Side of the feature map that the head averages over."""
        halvings = len(self.stage_blocks) - 1 + (2 if self.stem == "imagenet" else 0)
        return -(-resolution_px // 2**halvings)

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Keep the stem, one bottleneck with and one without a shortcut convolution, one stride."""
        return replace(self, stage_blocks=(2, 1), width=8, num_classes=num_classes)

    @property
    def twin_resolution_px(self) -> int:
        """Large enough for the twin's last stage to average over 4 x 4 places."""
        return 32 if self.stem == "imagenet" else 8

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Refuse what works on tokens, heads or blocks of transformers."""
        reasons = {
            group: f"`{group}={getattr(cell, group).name}` {why}, and `model={self.name}` has none: "
            f"use `{group}={plain}`, or a `vit_*`."
            for group, (plain, why) in OF_TRANSFORMERS.items()
            if getattr(cell, group).needs_transformer
        }
        if not cell.layout.batch_first:
            reasons["layout"] = (
                f"`layout={cell.layout.name}` orders the axes of tokens, and `model={self.name}` has "
                "none: use `layout=batch_first`, with `layout.channels_last=true` if you like."
            )
        if cell.memory.wraps_blocks:
            reasons["memory"] = (
                f"`memory={cell.memory.name}` wraps the blocks of a transformer; recomputing a "
                f"bottleneck of `model={self.name}` would move the running statistics of its "
                "BatchNorms twice: use `memory=keep_all`."
            )
        if cell.compilation.scope == "block":
            reasons["compilation"] = (
                f"`compilation={cell.compilation.name}` compiles one block for all, and those of `model="
                f"{self.name}` differ from stage to stage: use `compilation=compile_model`."
            )
        if cell.optimizer.needs_transformer:
            reasons["optimizer"] = (
                f"`optimizer={cell.optimizer.name}` works on the matrices of blocks, and the bottlenecks "
                f"of `model={self.name}` have convolutions: use `optimizer=adamw_fused`."
            )
        if cell.precision.float8:
            reasons["precision"] = (
                f"`precision={cell.precision.name}` swaps the linears of blocks, and the bottlenecks "
                f"of `model={self.name}` have convolutions: use `precision=O1` or `precision=bf16`."
            )
        return reasons

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a BatchNorm over a single value, and channels_last filters in flat buffers."""
        yield from super().conflicts(cell)
        if cell.micro_batch == 1 and self.last_side(cell.batch.resolution_px) == 1:
            yield (
                f"`model={self.name}` normalises over a micro-batch, and one image at "
                f"`batch.resolution_px={cell.batch.resolution_px}` leaves one value to normalise: "
                "use more images per replica and micro-batch, or larger ones."
            )
        flattened = cell.sharding.shards_parameters or cell.optimizer.keeps_gradient_views
        if cell.layout.channels_last and flattened:
            yield (
                "`layout.channels_last=true` orders filters in memory, and "
                f"`sharding={cell.sharding.name}` with `optimizer={cell.optimizer.name}` lays them "
                f"out flat: use `sharding=ddp` with another implementation than `contiguous`, or "
                "`layout.channels_last=false`."
            )


OF_TRANSFORMERS: Mapping[str, tuple[str, str]] = {
    "classifier": ("token", "chooses among tokens"),
    "attention": ("sdpa_auto", "computes attention"),
    "vit_block": ("plain", "rearranges the branches of transformer blocks"),
    "tokens": ("all", "drops or adds tokens"),
    "sequence_parallel": ("none", "shares tokens among ranks"),
    "tensor_parallel": ("none", "splits heads and MLPs"),
    "pipeline_parallel": ("none", "deals out transformer blocks"),
}
"""Group -> its plain choice, which does nothing here, and what all others do."""
