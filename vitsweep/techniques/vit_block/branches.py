"""Blocks and models that put the branches together in another way (needs torch)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.block import (
    Block,
    Context,
    Stack,
    become,
    blocks_of,
    stacks_of,
    swap_block_class,
)
from vitsweep.model.initialize import chosen


class ParallelBlock(nn.Module):
    """A block whose MLP reads what its attention reads."""

    def forward(self: Any, x: Tensor, context: Context | None = None) -> Tensor:
        """Transform the tokens of each image; the shape stays, and no context is read."""
        normed = self.norm_attention(x)
        return x + self.attend_branch(normed) + self.mlp_branch(normed)


def with_parallel_branches(model: nn.Module) -> nn.Module:
    """Let both branches of every block read its first norm; the second one goes."""
    for block in blocks_of(model):
        block.norm_mlp = None  # type: ignore[assignment]
    return swap_block_class(model, ParallelBlock)


class SampleDroppingBlock(nn.Module):
    """A block whose branches compute the images that they are given places of.

    Places are an input, drawn outside: a block that is recomputed, or compiled, gets them again.
    """

    images_axis: int

    def forward(self: Any, x: Tensor, context: Context | None = None, *places: Tensor) -> Tensor:
        """Transform the tokens; the shape stays.

        Args:
            x: tokens, (B, T, D) or (T, B, D).
            context: none.
            places: of the images that attention computes, and of those of the MLP, (kept) each;
                without them all images are computed.
        """
        if not places:
            return super().forward(x, context)
        x = self._add(x, places[0], lambda some: self.attend_branch(self.norm_attention(some)))
        return self._add(x, places[1], lambda some: self.mlp_branch(self.norm_mlp(some)))

    def _add(self, x: Tensor, places: Tensor, branch: Any) -> Tensor:
        axis = self.images_axis
        added = branch(x.index_select(axis, places)).to(x.dtype)
        return _AddedAt.apply(x, added, places, axis, x.shape[axis] / len(places))


class _AddedAt(torch.autograd.Function):
    """`x.index_add(axis, places, added, alpha=scale)`, whose backward pass keeps the places alone.

    torch's own keeps `added` for its shape: one activation more per branch, and a product more where
    the block is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, places: Tensor, axis: int, scale: float
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.axis, ctx.scale = axis, scale
        return x.index_add(axis, places, added, alpha=scale)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return upstream, upstream.index_select(ctx.axis, places) * ctx.scale, None, None, None


class ImageByImageBlock(SampleDroppingBlock):
    """The same by a loop over images."""

    def _add(self, x: Tensor, places: Tensor, branch: Any) -> Tensor:
        axis, kept = self.images_axis, set(places.tolist())
        images = [
            image + branch(image) * (x.shape[axis] / len(kept)) if number in kept else image
            for number, image in enumerate(x.split(1, axis))
        ]
        return torch.cat(images, axis)


class SampleDroppingStack(Stack):
    """Blocks of a model that draws in training which images each branch computes."""

    kept: Callable[[int], int]
    num_blocks: int
    images_axis: int

    def forward(self: Any, x: Tensor, context: Context | None = None, /) -> Tensor:
        """Run the blocks; the shape of the tokens stays."""
        if not self.training:
            return super().forward(x, context)
        images = x.shape[self.images_axis]
        # All blocks at once: few kernels, and each stack and each stage of a pipeline reads its own rows.
        size = (2 * self.num_blocks, images)
        numbers = self.draws.uniform(self, "drop_samples", size, x)
        places = chosen(numbers, self.kept(images))
        for block in self:
            x = block(x, context, places[2 * block.place], places[2 * block.place + 1])
        return x


def with_dropped_samples(
    model: nn.Module, kept: Callable[[int], int], *, image_by_image: bool = False
) -> nn.Module:
    """Let the model draw images, and its blocks compute those alone.

    Args:
        model: a ViT with `draws`.
        kept: images of a forward pass -> how many of them a branch computes.
        image_by_image: by a slow loop.
    """
    whole: Any = model
    axis = 0 if whole.batch_first else 1
    blocks = [block for stack in stacks_of(model) for block in stack]
    for place, block in enumerate(blocks):
        assert isinstance(block, Block)
        vars(block).update(place=place, images_axis=axis)
    swap_block_class(model, ImageByImageBlock if image_by_image else SampleDroppingBlock)
    drawing = {"kept": kept, "num_blocks": len(blocks), "images_axis": axis, "draws": whole.draws}
    for stack in stacks_of(model):
        vars(stack).update(drawing)
        become(stack, SampleDroppingStack)
    return model
