"""Augmentation of training batches on their device, and stochastic depth.

Augmentation: RandAugment, random erasing, mixup and CutMix. All random numbers follow from the seed and
the optimizer step, for the whole global batch at once, of which a replica takes its part: they do not
depend on the number of replicas and micro-batches, and a training that is resumed draws what it would
have drawn. Mixup and CutMix mix neighbours of the global batch, which is shuffled: a micro-batch has an
even number of images. The noise of random erasing is drawn on the device, and a GPU draws other numbers
than a CPU.
"""

from collections.abc import Iterator
from math import log, pi, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitsweep.model.block import Block, become, blocks_of
from vitsweep.model.initialize import named_generator
from vitsweep.spec.cell_spec import CellSpec, Recipe
from vitsweep.world import World

Pair = tuple[Tensor, Tensor]
MAGNITUDE_DEVIATION = 0.5
"""Standard deviation of RandAugment's magnitude from image to image (DeiT, Table 9: "9/0.5")."""
GEOMETRIC, PHOTOMETRIC = 5, 4
"""Kinds of distortion: shear x, y, translation x, y, rotation; brightness, contrast, sharpness, solarize."""
ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)


def augmented(batches: Iterator[Pair], cell: CellSpec, world: World, step: int) -> Iterator[Pair]:
    """Yield the batches of an epoch as the cell's recipe changes them.

    Args:
        batches: micro-batches of this replica: images (B, C, H, W) with mean 0 and deviation 1, and
            labels (B,).
        cell: gives recipe, seed and sizes.
        world: gives the replica.
        step: optimizer step of the first batch.

    Yields:
        Images, and labels: (B,), or shares of the classes (B, num_classes) where images are mixed.
    """
    recipe, steps = cell.recipe, cell.batch.accumulation_steps
    for index, (images, labels) in enumerate(batches):
        step_here, part = step + index // steps, index % steps
        generator = np.random.default_rng((cell.seed, 1, step_here))
        first = (world.data_parallel_rank * steps + part) * cell.micro_batch
        rows = slice(first, first + len(images))
        images = rand_augmented(images, recipe, generator, cell.images_per_step, rows)
        images = erased(images, recipe.erase_probability, generator, cell.images_per_step, rows)
        yield mixed(images, labels, recipe, generator, cell.model.num_classes)


def rand_augmented(
    images: Tensor, recipe: Recipe, generator: np.random.Generator, num_images: int, rows: slice
) -> Tensor:
    """Apply `rand_augment_ops` random distortions to each image (RandAugment, arXiv:1909.13719).

    Shears, translations and a rotation become one affine map, so that an image is sampled once.
    Strengths are those of timm's implementation; brightness moves all pixels by deviations of the data.
    Where an image is moved away its mean (0) appears.
    """
    if not recipe.rand_augment_ops:
        return images
    matrices = np.tile(np.eye(3), (num_images, 1, 1))
    strengths = np.zeros((PHOTOMETRIC, num_images))
    for _ in range(recipe.rand_augment_ops):
        kinds = generator.integers(GEOMETRIC + PHOTOMETRIC, size=num_images)
        magnitude = generator.normal(recipe.rand_augment_magnitude, MAGNITUDE_DEVIATION, num_images)
        signed = np.clip(magnitude, 0, 10) / 10 * generator.choice((-1, 1), num_images)
        matrices = _affine(kinds, signed) @ matrices
        for place in range(PHOTOMETRIC):
            strengths[place] += np.where(kinds == GEOMETRIC + place, signed, 0)
    own = torch.from_numpy(matrices[rows, :2]).to(images)
    grid = F.affine_grid(own, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return _photometric(moved, strengths[:, rows])


def _affine(kinds: NDArray[np.int64], signed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return maps (N, 3, 3) from places in the result, -1 to 1, to places in the image."""
    shear, shift, angle = 0.3 * signed, 2 * 0.45 * signed, pi / 6 * signed
    maps = np.tile(np.eye(3), (len(kinds), 1, 1))
    for kind, (row, column), value in (
        (0, (0, 1), shear), (1, (1, 0), shear), (2, (0, 2), shift), (3, (1, 2), shift),
    ):  # fmt: skip
        chosen = kinds == kind
        maps[chosen, row, column] = value[chosen]
    turned = kinds == 4
    maps[turned, 0, 0] = maps[turned, 1, 1] = np.cos(angle[turned])
    maps[turned, 0, 1], maps[turned, 1, 0] = -np.sin(angle[turned]), np.sin(angle[turned])
    return maps


def _photometric(images: Tensor, strengths: NDArray[np.float64]) -> Tensor:
    factors = 0.9 * torch.from_numpy(strengths).to(images)[:, :, None, None, None]
    brightness, contrast, sharpness, solarize = factors
    images = images + brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (1 + contrast) * (images - mean)
    blurred = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    images = images + sharpness * (images - blurred)
    threshold = images.amax(dim=(1, 2, 3), keepdim=True) * (1 - solarize.abs())
    turned = (solarize != 0) & (images > threshold)
    return torch.where(turned, 2 * threshold - images, images)


def erased(
    images: Tensor, probability: float, generator: np.random.Generator, num_images: int, rows: slice
) -> Tensor:
    """Fill a rectangle of some of the images with noise of deviation 1 (arXiv:1708.04896)."""
    if not probability:
        return images
    chosen = generator.random(num_images) < probability
    area = generator.uniform(*ERASED_AREA, num_images)
    aspect = np.exp(generator.uniform(log(ERASED_ASPECT[0]), log(ERASED_ASPECT[1]), num_images))
    centres = generator.random((2, num_images))
    seed = int(generator.integers(2**62))
    half = np.stack([np.sqrt(area * aspect), np.sqrt(area / aspect)]) / 2 * chosen
    inside = _boxes(images, centres[:, rows], half[:, rows])
    drawn, noise = torch.zeros_like(images), torch.Generator(images.device)
    for place, row in enumerate(range(rows.start, rows.stop)):
        if chosen[row]:  # each image has noise of its own, whoever holds it
            drawn[place].normal_(generator=noise.manual_seed(seed + row))
    return torch.where(inside, drawn, images)


def _boxes(images: Tensor, centres: NDArray[np.float64], half: NDArray[np.float64]) -> Tensor:
    """Return masks (N, 1, H, W) of boxes, given by centre and half sides as shares of the image."""
    inside = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=images.device)
    for axis, size in ((0, images.shape[-2]), (1, images.shape[-1])):
        places = (torch.arange(size, device=images.device, dtype=torch.float64) + 0.5) / size
        middle, reach = (
            torch.from_numpy(np.ascontiguousarray(v[axis])).to(images.device)[:, None]
            for v in (centres, half)
        )
        along = (places - middle).abs() < reach
        inside = inside & (along[:, None, :, None] if axis == 0 else along[:, None, None, :])
    return inside


def mixed(
    images: Tensor, labels: Tensor, recipe: Recipe, generator: np.random.Generator, num_classes: int
) -> Pair:
    """Mix the images of each pair of neighbours, the first and second, third and fourth (mixup or CutMix).

    One of both is drawn for the whole step, and one share: of the first image in the average, or of
    its pixels. Labels become shares of the classes. The number of images is even.
    """
    if not recipe.mixes:
        return images, labels
    cuts = recipe.cutmix_alpha > 0
    if cuts and recipe.mixup_alpha:
        cuts = bool(generator.random() < 0.5)
    alpha = recipe.cutmix_alpha if cuts else recipe.mixup_alpha
    share = float(generator.beta(alpha, alpha))
    centre = generator.random((2, 1))
    others = _neighbours(images)
    if cuts:
        half = np.full((2, 1), sqrt(1 - share) / 2)
        inside = _boxes(images, centre, half)
        images = torch.where(inside, others, images)
        share = 1 - float(inside.float().mean())  # the box may reach beyond the image
    else:
        images = share * images + (1 - share) * others
    targets = F.one_hot(labels, num_classes).to(images.dtype)
    return images, share * targets + (1 - share) * _neighbours(targets)


def _neighbours(rows: Tensor) -> Tensor:
    """Return rows with those of each pair swapped: 1, 0, 3, 2, ..."""
    return rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


# Stochastic depth: the branches of a block are left out for some images (arXiv:1603.09382).


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
