"""Attention within segments of the sequence: each rank attends to its own segments only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from vitsweep.spec.model_parallel import SequenceParallel
from vitsweep.spec.technique import AttentionPattern

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.model.attention import Attend
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class SegmentLocal(SequenceParallel):
    """Block-diagonal attention: a token attends to the tokens of its own segment.

    Attention sends nothing; segments interact through the head and the averaged gradients only.
    Another model than a ViT: compared with one process that attends within the same segments.

    Attributes:
        segments: of an image; resolved from auto: one per rank.
    """

    segments: Annotated[int, Gt(0)]

    axes: ClassVar[tuple[str, ...]] = ("sequence",)
    changes_model: ClassVar[bool] = True

    def unit(self, cell: "CellSpec") -> int:
        """Padded are whole segments."""
        return self.segments

    def attention_pattern(self, kernel: AttentionPattern) -> AttentionPattern:
        """Each segment attends to itself only."""
        return replace(kernel, segments=self.segments)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse segments that straddle ranks, and a class token, which would see one segment only."""
        ways = cell.mesh.sequence
        if self.segments % ways:
            yield (
                f"`sequence_parallel.segments={self.segments}` must be a multiple of "
                f"`mesh.sequence={ways}`: each rank has whole segments. Try "
                f"`sequence_parallel.segments={ways * max(1, self.segments // ways)}`."
            )
        if cell.model.has_class_token(cell.classifier.pooling):
            yield (
                f"`sequence_parallel={self.name}` shows the class token its own segment only: use "
                "`classifier=pooled`, which reads all of them."
            )
        if getattr(cell.transformer, "registers", 0):
            yield (
                f"`sequence_parallel={self.name}` shows registers the first segment only: use "
                "`tokens=all` and `model.registers=0`."
            )

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Attend to one segment after the other, in one process."""
        import torch

        from vitsweep.model.attention import attentions_along, token_axes

        axis, length = token_axes(model)[0]
        longest = -(-length // self.segments)

        def attend(whole: "Attend", *qkv_BHTK: "Tensor") -> "Tensor":
            segments = zip(*(x.split(longest, 2) for x in qkv_BHTK), strict=True)
            return torch.cat([whole(*qkv) for qkv in segments], 2)

        for attention in attentions_along(model, axis):
            attention.attend = partial(attend, attention.attend)
        return model

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens by whole segments; attend within each."""
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens
        from vitsweep.techniques.sequence_parallel.wrapped_attention import within_segments

        group, number = world.token_group(), self.segments
        first = group.rank() * (number // group.size())

        def attention(own: "Attend", length: int) -> "Attend":
            return within_segments(own, length, number, first)

        return on_own_tokens(model, world, attention, unit=number)
