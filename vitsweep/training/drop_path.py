"""Stochastic depth: the branches of a block are left out for some images (arXiv:1603.09382)."""

from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.block import Block, become, blocks_of
from vitsweep.model.initialize import named_generator
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


class StochasticDepth:
    """Leaves out attention and MLP of each block for some images while the model trains.

    The rate grows in a line from 0 at the first block to `rate` at the last one; what is kept is
    divided by the share that is kept. What is left out follows from the seed, the optimizer step, the
    branch and the image's place in the batch of all replicas: ranks and micro-batches do not change it.
    It is drawn before a step, so that a block that is computed again, compiled, or replayed from a
    recording of the step reads the same.

    Args:
        model: a transformer; its blocks get another class.
        rate: share of images for which the last block's branches are left out.
        cell: gives the seed, and how images are dealt out.
        world: gives the replica and its device.
    """

    def __init__(self, model: nn.Module, rate: float, cell: CellSpec, world: World) -> None:
        self._cell, self._world = cell, world
        self._blocks = [block for block in blocks_of(model) if isinstance(block, Block)]
        last = max(1, len(self._blocks) - 1)
        self._keep = [1 - rate * (index // 2) / last for index in range(2 * len(self._blocks))]
        self._factors_RSI: Tensor | None = None  # branches, micro-batches, images; of fixed address
        for block in self._blocks:
            vars(block)["images_axis"] = 0 if cell.layout.batch_first else 1
            become(block, DroppingBlock)

    def draw(self, step: int) -> None:
        """Decide for all images of one optimizer step; before it begins."""
        cell, world = self._cell, self._world
        generator = named_generator(cell.seed, f"drop_path {step}", world.device)
        size = (len(self._keep), cell.images_per_step)
        numbers = torch.rand(size, generator=generator, device=world.device, dtype=torch.float64)
        own = cell.batch.accumulation_steps * cell.micro_batch
        mine = numbers[:, world.data_parallel_rank * own :][:, :own]
        keep = torch.tensor(self._keep, device=world.device, dtype=torch.float64)[:, None]
        drawn = ((mine < keep) / keep).unflatten(1, (-1, cell.micro_batch))
        kept = self._factors_RSI
        self._factors_RSI = drawn if kept is None else kept.copy_(drawn)

    def select(self, micro_batch: int) -> None:
        """Let the next forward pass be that of a micro-batch of the step, from 0."""
        assert self._factors_RSI is not None
        factors = self._factors_RSI[:, micro_batch].unflatten(0, (-1, 2))
        for block, (attention, mlp) in zip(self._blocks, factors, strict=True):
            vars(block).update(attention_factors=attention, mlp_factors=mlp)


class DroppingBlock(nn.Module):
    """A block whose branches are multiplied by a number per image: 0, or 1 / share that is kept.

    A class rather than hooks: compiled blocks share their code, and hooks are none of its guards.
    """

    images_axis: int
    attention_factors: Tensor
    mlp_factors: Tensor

    def attend_branch(self: Any, normed: Tensor) -> Tensor:
        """Return what attention adds to the residual stream."""
        y = super().attend_branch(normed)  # type: ignore[misc]
        return self._times(y, self.attention_factors) if self.training else y

    def mlp_branch(self: Any, normed: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        y = super().mlp_branch(normed)  # type: ignore[misc]
        return self._times(y, self.mlp_factors) if self.training else y

    def _times(self, y: Tensor, factors: Tensor) -> Tensor:
        rows = y.shape[self.images_axis] // len(factors)
        if rows > 1:  # axial attention has the rows of each image in the place of images
            factors = factors.repeat_interleave(rows)
        shape = [1] * y.ndim
        shape[self.images_axis] = -1
        return y * factors.to(y.dtype).view(shape)
