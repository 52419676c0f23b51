"""LeJEPA at work: projector, SIGReg over all replicas, and a slow second implementation (needs torch)."""

from collections.abc import Mapping
from math import exp, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitsweep.collectives.primitives import sent_as
from vitsweep.model.vit import ViT
from vitsweep.objectives.base import Batch, OpenObjective, Step, Sum
from vitsweep.objectives.views import OpenViews, PlainCrops, PlainViewsViT, ViewsViT
from vitsweep.world import World

# Axes: B images, V views of each, K size of a projection, M directions, Q knots.

LAST_KNOT = 3.0


class Projected(ViewsViT):
    """Views -> projections (B, V, K), large ones first.

    Args:
        vit: the encoder.
        objective: with the projector's sizes.
    """

    def __init__(self, vit: ViT, objective: Any) -> None:
        super().__init__(vit)
        width, layers = vit.spec.width, list[nn.Module]()
        for _ in range(objective.projector_depth - 1):
            linear = nn.Linear(width, objective.projector_width)
            width = objective.projector_width
            layers.append(_Layer(linear=linear, norm=nn.LayerNorm(width)))
        layers.append(nn.Linear(width, objective.projected))
        self.heads = nn.Sequential(*layers)

    def forward(
        self, large: Tensor, small: Tensor | None = None, *, probed: bool = False
    ) -> Tensor:
        """Encode all views in one pass, then project; `probed`: return features (B, D) of one view."""
        views = [large] if small is None else [large, small]
        tokens = self.tokens_of(views)
        return self.features(tokens[0]) if probed else self.heads(self.features_of(tokens, views))


class _Layer(nn.ModuleDict):
    def __init__(self, *, linear: nn.Linear, norm: nn.LayerNorm) -> None:
        super().__init__({"linear": linear, "norm": norm})

    def forward(self, x: Tensor) -> Tensor:
        return self["norm"](self["linear"](x)).relu()


class OpenLeJepa(OpenViews):
    """Crops, and the loss of their projections."""

    def network(self, model: nn.Module) -> nn.Module:
        """Return the ViT with a projector in place of its head."""
        assert isinstance(model, ViT), "refused with other models"
        return Projected(model, self.settings)

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        """Return SIGReg over the images of all replicas, and the distance of views over this replica's."""
        apart = (outputs.mean(dim=1, keepdim=True) - outputs).square().mean()
        share = self.settings.weight
        return share * self.sigreg(outputs, step) + (1 - share) * apart

    def sigreg(self, z_BVK: Tensor, step: Step) -> Tensor:
        """Return the distance () of projections from a normal distribution, the mean over views."""
        t = torch.linspace(
            0, LAST_KNOT, self.settings.knots, device=z_BVK.device, dtype=z_BVK.dtype
        )
        normal = (-t.square() / 2).exp()  # its characteristic function, and the window
        gaps = torch.full_like(t, 2 * LAST_KNOT / (self.settings.knots - 1))
        gaps[:: len(t) - 1] /= 2  # the ends
        # in float64, since a GPU may compute products of float32 in TF32
        along_BVM = z_BVK.double() @ self.directions(z_BVK, step).double()
        angles_BVMQ = along_BVM.to(z_BVK.dtype)[..., None] * t
        parts = torch.stack([angles_BVMQ.cos().sum(0), angles_BVMQ.sin().sum(0)])
        means_VMQ, images = self._mean(parts, len(z_BVK), step)
        apart = (means_VMQ[0] - normal).square() + means_VMQ[1].square()
        return images * (apart * (gaps * normal)).sum(-1).mean()

    def directions(self, like: Tensor, step: Step) -> Tensor:
        """Return unit vectors (K, M), the same on every rank."""
        size, generator = (like.shape[-1], self.settings.directions), step.generator("directions")
        drawn = torch.randn(size, generator=generator, device=like.device, dtype=torch.float32)
        found = drawn.to(like.dtype)
        return found / found.norm(dim=0)

    def _mean(self, sums: Tensor, images: int, step: Step) -> tuple[Tensor, Tensor]:
        """Return the mean over the images of all replicas, and their number."""
        counted = torch.cat([sums.flatten(), sums.new_full((1,), images)])
        whole = sum_over_replicas(counted, step.world)
        return (whole[:-1] / whole[-1]).view_as(sums), whole[-1].detach()

    def score(self, outputs: Tensor, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Return the loss of held-out images, a batch of all replicas at a time."""
        images = len(outputs)
        return {"held_out_loss": Sum(self.loss(outputs, batch, step) * images, images)}

    def reference(self) -> OpenObjective:
        """Return loops over views, directions and knots."""
        return _ViewByView(self.cell)


def sum_over_replicas(x: Tensor, world: World | None) -> Tensor:
    """Return the sum over all replicas; each has the same loss of it, whose gradients are averaged."""
    if world is None or world.data_parallel_size == 1:
        return x
    group = world.gradient_group() or dist.group.WORLD
    found: Tensor = _SumOverReplicas.apply(x, group)
    return found


class _SumOverReplicas(torch.autograd.Function):
    """An all-reduce in both directions: the gradient of a sum is that of the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    with sent_as("activation"):
        dist.all_reduce(total, group=group)
    return total


# The same, slowly.


class _PlainProjected(PlainViewsViT, Projected):
    pass


class _ViewByView(PlainCrops, OpenLeJepa):
    def network(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, ViT)
        return _PlainProjected(model, self.settings)

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        (images, views, size), some = outputs.shape, self.settings
        generator = step.generator("directions")
        drawn = torch.randn(
            (size, some.directions), generator=generator, device=outputs.device, dtype=torch.float32
        )
        vectors = [v.to(outputs.dtype) for v in drawn.unbind(1)]
        gap, found = LAST_KNOT / (some.knots - 1), []
        for view in range(views):
            for vector in vectors:
                values = outputs[:, view] @ (vector / sqrt(float((vector.double() ** 2).sum())))
                for knot in range(some.knots):
                    t = knot * gap
                    window = exp(-t * t / 2)
                    real = torch.cos(values * t).sum() / images - window
                    imaginary = torch.sin(values * t).sum() / images
                    weight = (gap if knot in (0, some.knots - 1) else 2 * gap) * window
                    found.append(weight * (real**2 + imaginary**2))
        sigreg = images * torch.stack(found).sum() / (views * some.directions)
        apart = [
            ((z - image.sum(0) / views) ** 2).sum() for image in outputs for z in image.unbind(0)
        ]
        return some.weight * sigreg + (1 - some.weight) * torch.stack(apart).sum() / outputs.numel()
