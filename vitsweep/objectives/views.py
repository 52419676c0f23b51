"""Crops of images, and a ViT that sees a list of them in one pass (needs torch)."""

from collections.abc import Sequence
from math import ceil, floor, log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.block import become
from vitsweep.model.initialize import draw_transformer_weight
from vitsweep.model.vit import Embedding, ViT
from vitsweep.objectives.base import Batch, Step
from vitsweep.objectives.probe import Encoder, Probed

# Axes: B images, V views of each, C channels, H pixels of a large side, h of a small one, T tokens, D width.

RATIO = 4 / 3
"""Most of the longer side of a crop to the shorter one (torchvision's RandomResizedCrop)."""


class ResizedPositions(Embedding):
    """An embedding that takes images of other sides: positions of patches are interpolated bicubically.

    As DINOv2 does it, in float32 or wider. The class token's position stays.
    """

    def position_of(self, length: int) -> Tensor:
        """Return the positions of a square of patches, and of the class token before it."""
        first = 0 if self.class_token is None else 1
        if length == len(self.position):
            return self.position
        whole, wanted = (round((n - first) ** 0.5) for n in (len(self.position), length))
        wide = self.position[first:].to(torch.promote_types(self.position.dtype, torch.float32))
        square = wide.unflatten(0, (whole, whole)).permute(2, 0, 1)[None]
        found = F.interpolate(square, size=(wanted, wanted), mode="bicubic")[0]
        return torch.cat([self.position[:first], found.flatten(1).t().to(self.position.dtype)])


class ViewsViT(Encoder):
    """A ViT without its head, on large and small views of each image.

    Args:
        vit: whose embedding, blocks and norm it takes.
    """

    embedding: Embedding
    mask_token: nn.Parameter

    def __init__(self, vit: ViT) -> None:
        super().__init__(vit)
        self.embedding = become(vit.embedding, ResizedPositions)
        self.blocks, self.norm = vit.blocks, vit.norm

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw one weight in place: of what is added, linears as those of blocks."""
        if name.startswith("heads.") and weight.ndim == 2:
            nn.init.trunc_normal_(weight, std=0.02, generator=generator)
        elif name.startswith("heads.") and name.endswith("norm.weight"):
            nn.init.ones_(weight)
        else:
            scale = self.spec.layer_scale or 1.0
            draw_transformer_weight(name, weight, generator, layer_scale=scale)

    def tokens_of(self, views: Sequence[Tensor], hidden: Tensor | None = None) -> list[Tensor]:
        """Return the tokens (B V, T, D) after the last norm, of each of several (B, V, C, h, h).

        Args:
            views: large ones, then small ones.
            hidden: (B, V, P) patches of the large ones that `mask_token` stands for.
        """
        x = [self.embedding(part.flatten(0, 1)) for part in views]
        if hidden is not None:
            x[0] = self._masked(x[0], hidden.flatten(0, 1))
        return [self.by_image(self.norm(part)) for part in self.blocks(x, None)]

    def features_of(self, tokens: Sequence[Tensor], views: Sequence[Tensor]) -> Tensor:
        """Return the features (B, V, D) of all views from what `tokens_of` returned for them."""
        pairs = zip(tokens, views, strict=True)
        return torch.cat([self.features(x).unflatten(0, v.shape[:2]) for x, v in pairs], dim=1)

    def _masked(self, x: Tensor, hidden: Tensor) -> Tensor:
        patches = hidden.shape[1]
        position = self.embedding.position_of(self.embedding.position.shape[0])[-patches:]
        x_BTD, filler = self.by_image(x), self.mask_token + position
        first, seen = x_BTD.split([x_BTD.shape[1] - patches, patches], dim=1)
        whole = torch.cat([first, torch.where(hidden[..., None], filler, seen)], dim=1)
        return whole if self.batch_first else whole.transpose(0, 1).contiguous()


class OpenViews(Probed):
    """What all objectives on crops share."""

    def of_probe(self, batch: Batch) -> Batch:
        """Return the middle of images as the one view."""
        images, side = batch["image"], self.cell.batch.resolution_px
        first = (images.shape[-1] - side) // 2
        images = images[:, None, :, first : first + side, first : first + side]
        return {"large": images, "probed": True}

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Return `large` (B, V, C, H, H) and `small` (B, V, C, h, h) crops, and labels where there are."""
        images, some, cell = batch["image"].to(self.dtype), self.settings, self.cell
        found = {"label": batch["label"]} if "label" in batch else {}
        drawn = step.uniform("large crops", len(images), some.large_views, 5)
        side, areas = cell.batch.resolution_px, (some.between_area, 1.0)
        found["large"] = self._cropped(images, drawn, side, areas)
        if some.small_views:
            drawn = step.uniform("small crops", len(images), some.small_views, 5)
            side, areas = some.small_px(cell), (some.least_area, some.between_area)
            found["small"] = self._cropped(images, drawn, side, areas)
        return found

    def _cropped(
        self, images: Tensor, drawn: Tensor, side: int, areas: tuple[float, float]
    ) -> Tensor:
        """Return crops (B, V, C, side, side), with areas between two shares of that of an image.

        Args:
            images: (B, C, H, W).
            drawn: (B, V, 5) numbers of [0, 1): area, ratio of the sides, place, whether it is mirrored.
            side: in pixels.
            areas: the least and the most.
        """
        area, ratio, left, top, flip = drawn.double().unbind(-1)  # few numbers
        area = areas[0] + (areas[1] - areas[0]) * area
        ratio = ((2 * ratio - 1) * log(RATIO)).exp()
        width, height = ((area * r).sqrt().clamp(max=1) for r in (ratio, 1 / ratio))
        places = (torch.arange(side, device=images.device, dtype=torch.float64) + 0.5) / side
        mirrored = (flip < 0.5)[..., None] & self.settings.flips
        across = torch.where(mirrored, places.flip(0), places)
        x_BVs = (left * (1 - width))[..., None] + width[..., None] * across
        y_BVs = (top * (1 - height))[..., None] + height[..., None] * places
        pairs = zip(x_BVs.unbind(1), y_BVs.unbind(1), strict=True)
        return torch.stack([_resampled(_resampled(images, 2, y), 3, x) for x, y in pairs], dim=1)


def _resampled(images: Tensor, axis: int, places_Bs: Tensor) -> Tensor:
    """Read an axis of each image at places within [0, 1], between the middles of pixels linearly.

    `grid_sample` takes places in the dtype of images: in float32 they are off by 1e-5 px.
    """
    length = images.shape[axis]
    at = (places_Bs * length - 0.5).clamp(0, length - 1)
    low, shape = at.floor(), [*images.shape]
    shape[axis] = at.shape[1]

    def spread(values_Bs: Tensor) -> Tensor:
        return (values_Bs[:, None, :, None] if axis == 2 else values_Bs[:, None, None]).expand(
            shape
        )

    before = images.gather(axis, spread(low.long()))
    after = images.gather(axis, spread((low + 1).clamp(max=length - 1).long()))
    return before.lerp(after, spread((at - low).to(images.dtype)))


# The same, slowly.


class PlainViewsViT(ViewsViT):
    """One view after the other, with positions by the cubic's formula."""

    def tokens_of(self, views: Sequence[Tensor], hidden: Tensor | None = None) -> list[Tensor]:
        """Return the same as `ViewsViT`."""
        found = []
        for part in views:
            own = []
            for view, images in enumerate(part.unbind(1)):
                x = self._embedded(images)
                if hidden is not None and part is views[0]:
                    x = self._replaced(x, hidden[:, view].tolist())
                own.append(self.norm(self.blocks(x)))
            found.append(torch.stack(own, dim=1).flatten(0, 1))
        return found

    def _replaced(self, x: Tensor, hidden: list[list[bool]]) -> Tensor:
        rows, first = [], x.shape[1] - len(hidden[0])
        position, own = self.embedding.position, int(self.embedding.class_token is not None)
        for image, flags in zip(x, hidden, strict=True):
            patches = [
                (self.mask_token + position[own + p]).to(x.dtype) if flag else image[first + p]
                for p, flag in enumerate(flags)
            ]
            rows.append(torch.stack([*image[:first], *patches]))
        return torch.stack(rows)

    def _embedded(self, images: Tensor) -> Tensor:
        embedding: Embedding = self.embedding
        patches = embedding.patch(images).flatten(2).transpose(1, 2)
        count, first = patches.shape[1], int(embedding.class_token is not None)
        position = embedding.position
        whole, side = round((len(position) - first) ** 0.5), round(count**0.5)
        along = cubic_weights(side, whole).to(position.device, position.dtype)
        square = position[first:].unflatten(0, (whole, whole))
        wide = torch.promote_types(position.dtype, torch.float32)
        seen = torch.einsum("aw,bh,whd->abd", along.to(wide), along.to(wide), square.to(wide))
        x = patches + (square if side == whole else seen.to(position.dtype)).flatten(0, 1)
        if embedding.registers is not None:
            x = torch.cat([embedding.registers.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        if embedding.class_token is None:
            return x
        token = (embedding.class_token + position[0]).to(x.dtype).expand(len(x), 1, -1)
        return torch.cat([token, x], dim=1)


def cubic_weights(side: int, whole: int) -> Tensor:
    """Return by what (side, whole) a line is resized: the cubic convolution with a = -3/4 (Keys, 1981)."""
    found = torch.zeros(side, whole, dtype=torch.float64)
    for place in range(side):
        at = (place + 0.5) * whole / side - 0.5
        for source in range(floor(at) - 1, floor(at) + 3):
            x, a = abs(at - source), -0.75
            inner = ((a + 2) * x - (a + 3)) * x * x + 1
            outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
            weight = inner if x <= 1 else outer if x < 2 else 0.0
            found[place, min(max(source, 0), whole - 1)] += weight
    return found


class PlainCrops(OpenViews):
    """Crops as products of every image with weights of its rows and columns."""

    def _cropped(
        self, images: Tensor, drawn: Tensor, side: int, areas: tuple[float, float]
    ) -> Tensor:
        crops = []
        for image, of_views in zip(images, drawn.tolist(), strict=True):
            for u in of_views:
                area = areas[0] + (areas[1] - areas[0]) * u[0]
                ratio = RATIO ** (2 * u[1] - 1)
                sides = min(1.0, (area * ratio) ** 0.5), min(1.0, (area / ratio) ** 0.5)
                across, down = (
                    _linear_weights(side, image.shape[2 - axis], start * (1 - size), size)
                    for axis, (start, size) in enumerate(zip(u[2:4], sides, strict=True))
                )
                if self.settings.flips and u[4] < 0.5:
                    across = across.flip(0)
                weights = [w.to(image.device) for w in (down, across)]
                crop = torch.einsum("yh,xw,chw->cyx", *weights, image.double())
                crops.append(crop.to(image.dtype))
        return torch.stack(crops).unflatten(0, drawn.shape[:2])


def _linear_weights(side: int, whole: int, start: float, size: float) -> Tensor:
    """Return by what (side, whole) a part of a line is resized, between pixels linearly."""
    found = torch.zeros(side, whole, dtype=torch.float64)
    for place in range(side):
        at = (start + size * (place + 0.5) / side) * whole - 0.5
        at = min(max(at, 0.0), whole - 1.0)
        found[place, floor(at)] += 1 - (at - floor(at))
        if at > floor(at):
            found[place, ceil(at)] += at - floor(at)
    return found
