"""Self-distillation at work: heads, teacher, losses over replicas, and a slow second implementation."""

from collections.abc import Callable, Iterable, Mapping
from math import cos, log, pi
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.collectives.primitives import sent_as
from vitsweep.collectives.resharding import gather
from vitsweep.model.initialize import picked_rows
from vitsweep.model.vit import ViT
from vitsweep.objectives.base import Batch, OpenObjective, Step, Sum
from vitsweep.objectives.sigreg import sum_over_replicas
from vitsweep.objectives.views import OpenViews, PlainCrops, PlainViewsViT, ViewsViT
from vitsweep.spec.cell_spec import CellSpec

# Axes: B images, G = 2 large views of each, V views, P patches of a large one, M of them masked at most,
#       K prototypes, D width.

Outputs = Mapping[str, Tensor]
"""`views` (B, V, K) and `patches` (B, M, K): logits; `tokens` (B, G, D) before the head."""

LEAST_INFORMATION = 0.001
"""Mutual information of images and prototypes, as a share of log K, below which a training collapsed."""


class Head(nn.Module):
    """Three linears, a vector of length 1, and its products with prototypes."""

    def __init__(self, width: int, objective: Any) -> None:
        super().__init__()
        sizes = (width, objective.head_width, objective.head_width, objective.bottleneck)
        self.linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.prototypes = nn.Linear(objective.bottleneck, objective.prototypes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., K) of (..., D)."""
        *inner, last = self.linears
        for linear in inner:
            x = F.gelu(linear(x))
        x = last(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.prototypes(F.normalize(wide, dim=-1).to(x.dtype))


class Distilled(ViewsViT):
    """Views and masks -> `Outputs`.

    Args:
        vit: the encoder.
        objective: with the heads' sizes.
    """

    def __init__(self, vit: ViT, objective: Any) -> None:
        super().__init__(vit)
        width = vit.spec.width
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.heads = nn.ModuleDict(
            {"view": Head(width, objective), "patch": Head(width, objective)}
        )

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw one weight in place; the mask token is normal with 0.02, since zeros would prove little."""
        if name == "mask_token":
            nn.init.normal_(weight, std=0.02, generator=generator)
        else:
            super().draw(name, weight, generator)

    def forward(  # type: ignore[override]
        self,
        large: Tensor,
        masked_view: Tensor | None = None,
        masked: Tensor | None = None,
        small: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Outputs | Tensor:
        """Encode all views in one pass; of one view without masks return features (B, D).

        Args:
            large: (B, G, C, H, H).
            masked_view: (B,) which of an image's large views is masked.
            masked: (B, M) its patches of which `patches` are returned.
            small: (B, V - G, C, h, h).
            hidden: (B, G, P) patches that a mask token stands for; a teacher sees all.
        """
        views = [large] if small is None else [large, small]
        tokens = self.tokens_of(views, hidden)
        if masked_view is None or masked is None:
            return self.features(tokens[0])
        features = self.features_of(tokens, views)
        patches = tokens[0][:, self.num_prefix_tokens :].unflatten(0, large.shape[:2]).flatten(1, 2)
        first = masked_view[:, None] * (patches.shape[1] // large.shape[1])
        return {
            "views": self.heads["view"](features),
            "patches": self.heads["patch"](picked_rows(patches, masked + first)),
            "tokens": features[:, : large.shape[1]],
        }


class OpenDistillation(OpenViews):
    """Crops, masks, and the three losses."""

    def __init__(self, cell: CellSpec) -> None:
        super().__init__(cell)
        self.patches = (cell.batch.resolution_px // cell.model.patch_px) ** 2  # type: ignore[attr-defined]

    def momentum(self, number: int, total: int | None) -> float:
        """Return the decay of the teacher's average: half a cosine from the first one to 1."""
        start, progress = self.settings.momentum, number / total if total else 0.0
        return 1 - (1 - start) * (1 + cos(pi * progress)) / 2

    def network(self, model: nn.Module) -> nn.Module:
        """Return the ViT with two heads in place of its own."""
        assert isinstance(model, ViT), "refused with other models"
        return Distilled(model, self.settings)

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Add to crops which view is masked (B,), its masked patches (B, M), and weights (B, M) of these.

        Patches beyond an image's number of masked ones have weight 0; others 1 / that number.
        """
        prepared, images, some = super().prepare(batch, step), len(batch["image"]), self.settings
        side, share = step.uniform("masked view", images, 2).double().unbind(1)
        order = step.uniform("masked patches", images, self.patches).argsort(dim=1, stable=True)
        most = self.patches // 2
        share = some.least_masked + (some.most_masked - some.least_masked) * share
        count = (share * self.patches).floor().clamp(1, most)[:, None]
        view, masked = (side < 0.5).long(), order[:, :most]
        is_masked = torch.arange(most, device=order.device) < count
        hidden = torch.zeros(images, some.large_views, self.patches, device=order.device).bool()
        rows = torch.arange(images, device=order.device)[:, None]
        hidden[rows, view[:, None], masked] = is_masked
        weights = is_masked / count
        own = {"masked_view": view, "masked": masked, "weights": weights, "hidden": hidden}
        return {**prepared, **own}

    def of_teacher(self, batch: Batch) -> Batch:
        """Return large views alone, of which no patch is hidden."""
        return {name: batch[name] for name in ("large", "masked_view", "masked")}

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        """Return the sum of the three losses; all in the dtype of the outputs, float32 or wider."""
        some = self.settings
        return (
            self.of_views(outputs, batch, step)
            + some.ibot_weight * self.of_patches(outputs, batch, step)
            + some.koleo_weight * sum(self.koleo(z, step) for z in outputs["tokens"].unbind(1))
        )

    def of_views(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        """Return DINO's loss: the mean cross entropy over pairs of a view and another large one."""
        taught = batch["teacher"]["views"][:, : self.settings.large_views]
        student = outputs["views"]
        wanted = self.shares(taught.flatten(0, 1), step).view_as(taught)
        # of the other large view, and of both; no matrix product, which may be in TF32
        small = wanted.sum(1, keepdim=True).expand(-1, student.shape[1] - 2, -1)
        others = torch.cat([wanted.flip(1), small], dim=1)
        pairs = 2 * len(student) * (student.shape[1] - 1)
        return -(others * self.log_shares(student)).sum() / pairs

    def of_patches(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        """Return iBOT's loss: the mean over masked patches of a view, then over all large views."""
        taught, weights = batch["teacher"]["patches"], batch["weights"].to(outputs["patches"].dtype)
        is_masked = weights.flatten() > 0
        wanted = self.shares(taught.flatten(0, 1), step, is_masked).view_as(taught)
        found = self.log_shares(outputs["patches"])
        by_patch = -(wanted * found).sum(-1)
        return (by_patch * weights).sum() / (len(weights) * self.settings.large_views)

    def log_shares(self, logits: Tensor) -> Tensor:
        """Return the student's log-probabilities of the prototypes (..., K)."""
        return (logits / self.settings.student_temperature).log_softmax(-1)

    def koleo(self, z_BD: Tensor, step: Step) -> Tensor:
        """Return -mean log(distance to the nearest other image) over all replicas (arXiv:1806.03198).

        Args:
            z_BD: class tokens of one view of each image of this replica; all are scaled to length 1.
            step: gives the replicas.
        """
        z = F.normalize(z_BD, dim=-1)
        if step.world is not None and step.world.data_parallel_size > 1:
            group = step.world.gradient_group() or dist.group.WORLD
            assert group is not None
            z = gather(z, 0, step.num_images, group)
        with torch.no_grad():
            wide = z.double()  # no product in TF32
            nearest = (wide @ wide.t()).fill_diagonal_(-torch.inf).argmax(1)
        return -((z - z[nearest]).norm(dim=1) + 1e-8).log().mean()

    @torch.no_grad()
    def shares(self, logits: Tensor, step: Step, counted: Tensor | None = None) -> Tensor:
        """Return the teacher's probabilities of the prototypes (N, K), by Sinkhorn-Knopp over all replicas.

        Args:
            logits: (N, K).
            step: gives the temperature, and the replicas.
            counted: (N,) rows that count; the others get zeros. None for all.
        """
        scaled, world = logits / self.temperature(step), step.world
        if not self.settings.sinkhorn_iterations:
            return scaled.softmax(-1)
        if counted is not None:
            scaled = scaled.masked_fill(~counted[:, None], -torch.inf)
        least = scaled.new_full(scaled.shape[1:], -torch.inf)
        most = scaled.amax(0) if len(scaled) else least  # all images are damaged
        if world is not None and world.data_parallel_size > 1:
            with sent_as("activation"):
                dist.all_reduce(most, dist.ReduceOp.MAX, group=world.gradient_group())
        # the first iteration divides each prototype by its sum, and so by this factor too
        found = (scaled - most).exp()
        for _ in range(self.settings.sinkhorn_iterations):
            # the number of images, by which both are divided in the source, cancels out
            found = found / sum_over_replicas(found.sum(0), world)
            found = found / found.sum(1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)
        return found

    def temperature(self, step: Step) -> float:
        """Return the teacher's."""
        some, epochs = self.settings, self.cell.task.epochs
        if step.total is None or not epochs:
            return some.teacher_temperature
        warm = some.warmup_epochs * step.total / epochs
        share = min(1.0, step.number / warm) if warm else 1.0
        return some.teacher_temperature + share * (some.last_temperature - some.teacher_temperature)

    def evaluate(
        self,
        predict: Callable[[Batch], Any],
        batches: Iterable[tuple[Batch, Step]],
        device: torch.device,
    ) -> dict[str, float]:
        """Add (H(mean of p) - mean of H(p)) / log K over the probabilities p of prototypes of large views.

        It is the mutual information of held-out view and prototype: 0 where all have the same prototypes. The
        two entropies tell apart the ways to collapse (DINO, arXiv:2104.14294, section 5.3).
        """
        prototypes, some = self.settings.prototypes, self.settings
        sums = torch.zeros(prototypes + 2, device=device, dtype=torch.float64)

        def noted(batch: Batch) -> Any:
            outputs = predict(batch)
            if isinstance(outputs, Mapping):
                logits = outputs["views"][:, : some.large_views].flatten(0, 1).double()
                log_shares = (logits / some.teacher_temperature).log_softmax(-1)
                shares = log_shares.exp()
                rest = -(shares * log_shares).sum(), shares.sum()
                sums.add_(torch.cat([shares.sum(0), torch.stack(rest)]))
            return outputs

        found = super().evaluate(noted, batches, device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        mean = sums[:prototypes] / sums[-1]
        entropy = -torch.special.xlogy(mean, mean).sum()
        information = float(entropy - sums[-2] / sums[-1]) / log(prototypes)
        return found | {"prototype_information": information}

    def flags(self, scores: Mapping[str, float]) -> Mapping[str, bool]:
        """Say so too where all images have the same prototypes."""
        alike = not scores["prototype_information"] >= LEAST_INFORMATION
        return {"collapsed": alike or super().flags(scores)["collapsed"]}

    def score(self, outputs: Outputs, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Return DINO's loss of held-out images, of the teacher's network with itself."""
        images = len(outputs["views"])
        loss = self.of_views(outputs, {**batch, "teacher": outputs}, step)
        return {"held_out_loss": Sum(loss * images, images)}

    def reference(self) -> OpenObjective:
        """Return loops over images, views and prototypes."""
        return _PairByPair(self.cell)


# The same, slowly.


class _PlainDistilled(PlainViewsViT, Distilled):
    pass


class _PairByPair(PlainCrops, OpenDistillation):
    def network(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, ViT)
        return _PlainDistilled(model, self.settings)

    def prepare(self, batch: Batch, step: Step) -> Batch:
        prepared, some = OpenViews.prepare(self, batch, step), self.settings
        most, views, all_masked, weights, hidden = self.patches // 2, [], [], [], []
        drawn = step.uniform("masked view", len(batch["image"]), 2).tolist()
        numbers = step.uniform("masked patches", len(batch["image"]), self.patches).tolist()
        for (side, share), of_patches in zip(drawn, numbers, strict=True):
            view, places = int(side < 0.5), sorted(range(self.patches), key=of_patches.__getitem__)
            share = some.least_masked + (some.most_masked - some.least_masked) * share
            count = min(most, max(1, int(share * self.patches)))
            flags = [[False] * self.patches for _ in range(some.large_views)]
            for place in places[:count]:
                flags[view][place] = True
            views.append(view)
            all_masked.append(places[:most])
            weights.append([1 / count] * count + [0.0] * (most - count))
            hidden.append(flags)
        lists = {"masked_view": views, "masked": all_masked, "weights": weights, "hidden": hidden}
        device = batch["image"].device
        return {**prepared, **{n: torch.tensor(found, device=device) for n, found in lists.items()}}

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        some, found = self.settings, [self.of_views(outputs, batch, step)]
        found.append(some.ibot_weight * self.of_patches(outputs, batch, step))
        for view in range(some.large_views):
            found.append(some.koleo_weight * self.koleo(outputs["tokens"][:, view], step))
        return torch.stack(found).sum()

    def of_views(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        taught, student = batch["teacher"]["views"], outputs["views"]
        rows = [image[g] for image in taught for g in range(self.settings.large_views)]
        wanted = self._balanced(rows, step)
        losses = []
        for b, image in enumerate(student):
            for g in range(self.settings.large_views):
                for v, logits in enumerate(image):
                    if v != g:
                        shares = wanted[self.settings.large_views * b + g]
                        losses.append(self._cross_entropy(shares, logits))
        return torch.stack(losses).sum() / len(losses)

    def of_patches(self, outputs: Outputs, batch: Batch, step: Step) -> Tensor:
        weights = batch["weights"].tolist()
        places = [(b, m) for b, own in enumerate(weights) for m, w in enumerate(own) if w > 0]
        wanted = self._balanced([batch["teacher"]["patches"][b, m] for b, m in places], step)
        by_image: dict[int, list[Tensor]] = {}
        for (b, m), shares in zip(places, wanted, strict=True):
            loss = self._cross_entropy(shares, outputs["patches"][b, m])
            by_image.setdefault(b, []).append(loss)
        means = [torch.stack(losses).sum() / len(losses) for losses in by_image.values()]
        return torch.stack(means).sum() / (self.settings.large_views * len(weights))

    def _cross_entropy(self, shares: Tensor, logits: Tensor) -> Tensor:
        scaled = logits / self.settings.student_temperature
        return -(shares * (scaled - torch.logsumexp(scaled, 0))).sum()

    def _balanced(self, rows: list[Tensor], step: Step) -> list[Tensor]:
        """Follow `sinkhorn_knopp_teacher` of DINOv2 literally: prototypes are rows, images columns."""
        scaled = torch.stack([row / self.temperature(step) for row in rows]).t()
        if not self.settings.sinkhorn_iterations:
            return [*scaled.t().softmax(-1)]
        q = (scaled - scaled.max()).exp()
        prototypes, images = q.shape
        q = q / q.sum()
        for _ in range(self.settings.sinkhorn_iterations):
            q = q / q.sum(dim=1, keepdim=True) / prototypes
            q = q / q.sum(dim=0, keepdim=True) / images
        return [*(q * images).t()]

    def koleo(self, z_BD: Tensor, step: Step) -> Tensor:
        unit = [z / z.square().sum().sqrt() for z in z_BD]
        losses = []
        for a, one in enumerate(unit):
            others = torch.stack(
                [(one - z).square().sum().sqrt() for b, z in enumerate(unit) if b != a]
            )
            losses.append(-torch.log(others.min() + 1e-8))
        return torch.stack(losses).sum() / len(losses)
