"""A linear probe of features, and whether these collapsed (needs torch)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitsweep.model.block import Network
from vitsweep.model.vit import ViT
from vitsweep.objectives.base import Batch, OpenObjective, Step

# Axes: N images, T tokens, D width, C classes.

PENALTIES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
"""Of the probe, as shares of the number of images that it is fitted to."""
MOST_FITS = 10
"""Of a probe; ten shares of the held-out images tell enough."""
LEAST_SPREAD = 0.001
"""Spread of features below which a training collapsed: all images have one vector."""


class Encoder(Network):
    """A ViT without its head, that gives features.

    Args:
        vit: whose embedding, blocks and norm the subclass takes.
    """

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.spec, self.batch_first, self.pooling = vit.spec, vit.batch_first, vit.pooling
        self.num_prefix_tokens = vit.num_prefix_tokens

    def features(self, x_BTD: Tensor) -> Tensor:
        """Return what a classifier would read (B, D): the class token, or the mean over patches."""
        if self.pooling == "token":
            return x_BTD[:, 0]
        return x_BTD[:, self.num_prefix_tokens :].mean(dim=1)

    def by_image(self, x: Tensor) -> Tensor:
        """Return the tokens of blocks as (B, T, D)."""
        return x if self.batch_first else x.transpose(0, 1)


class Probed(OpenObjective):
    """An objective without labels, whose network also returns features: a probe says what they are good for.

    Besides `score` there are the accuracy of a probe on the held-out images that have labels, and the
    spread of their features: E |z - E z|^2 of features z of length 1, from 0 (one vector) to 1.
    """

    def of_probe(self, batch: Batch) -> Batch:
        """Return what of a batch as given the network sees to return features (N, D)."""
        raise NotImplementedError

    def evaluate(
        self,
        predict: Callable[[Batch], Any],
        batches: Iterable[tuple[Batch, Step]],
        device: torch.device,
    ) -> dict[str, float]:
        """Return the scores, in a pass more over the whole images."""
        rows: list[Tensor] = []

        def seen() -> Iterator[tuple[Batch, Step]]:
            for batch, at in batches:
                features = predict(self.of_probe(batch)).float()
                if not rows:
                    rows.append(features.new_zeros(at.num_images, features.shape[1] + 2))
                labels = batch.get("label")
                if labels is None or labels.ndim > 1:
                    labels = features.new_full(features.shape[:1], -1)
                own = torch.column_stack([features, labels, torch.ones_like(labels)])
                rows[0][at.first : at.first + len(own)] = own
                yield batch, at

        found = super().evaluate(predict, seen(), device)
        if dist.is_initialized():
            dist.all_reduce(rows[0])
        # ranks that share an image gave the same; a damaged one is missing
        features, labels, counted = rows[0].double().tensor_split([-2, -1], dim=1)
        given = counted[:, 0] > 0
        features, labels = (
            features[given] / counted[given],
            (labels / counted)[given, 0].round().long(),
        )
        probed = self.cell.objective.probe_images  # type: ignore[attr-defined]
        if len(labels) > 1 and not bool((labels < 0).any()):
            found["probe_top1"] = probe_accuracy(features, labels, probed)
        return found | {"feature_spread": spread(features)}

    def flags(self, scores: Mapping[str, float]) -> Mapping[str, bool]:
        """Say that features collapsed, where they are as good as one vector."""
        return {"collapsed": not scores["feature_spread"] >= LEAST_SPREAD}


def spread(features_ND: Tensor) -> float:
    """Return the mean square distance of features of length 1 from their mean."""
    unit = torch.nn.functional.normalize(features_ND, dim=1)
    return float((unit - unit.mean(0)).square().sum(1).mean())


def probe_accuracy(features_ND: Tensor, labels: Tensor, images: int | None) -> float:
    """Return the top-1 accuracy of a linear probe, the mean over probes that are fitted to other images.

    Image n is in share n mod G of G = N / `images`, rounded down. Each of the first `MOST_FITS` shares fits
    a probe, which is scored on all other images. There are no random numbers.

    Args:
        features_ND: frozen ones, float64.
        labels: (N,) int64.
        images: that fit a probe; None for a half.
    """
    shares = max(2, len(labels) // images if images else 2)
    place = torch.arange(len(labels), device=labels.device) % shares
    found = [_fitted(features_ND, labels, place == n) for n in range(min(shares, MOST_FITS))]
    return sum(found) / len(found)


def _fitted(features_ND: Tensor, labels: Tensor, is_fitted: Tensor) -> float:
    """Fit ridge regression of classes to some images, and return the accuracy on the others.

    Features have mean 0 and deviation 1 over the fitted images. The penalty is that of `PENALTIES` with the
    least square error of each fitted image by all others (PRESS; Allen, Technometrics 16, 1974): residual /
    (1 - leverage).
    """
    fitted, classes = features_ND[is_fitted], int(labels.max()) + 1
    mean, deviation = fitted.mean(0), fitted.std(0, correction=0)
    x = (features_ND - mean) / deviation.clamp(min=1e-12)
    x_ND, targets_NC = x[is_fitted], torch.nn.functional.one_hot(labels[is_fitted], classes).to(x)
    base = targets_NC.mean(0)
    values, vectors = torch.linalg.eigh(x_ND.t() @ x_ND)
    along_ND = x_ND @ vectors
    products_DC = along_ND.t() @ (targets_NC - base)
    errors, weights = [], []
    for share in PENALTIES:
        inverse = 1 / (values.clamp(min=0) + share * len(x_ND))
        weights.append(inverse[:, None] * products_DC)
        leverage = along_ND.square() @ inverse + 1 / len(x_ND)
        residuals = targets_NC - base - along_ND @ weights[-1]
        errors.append((residuals / (1 - leverage)[:, None]).square().sum())
    best = int(torch.stack(errors).argmin())
    guessed = (x[~is_fitted] @ vectors @ weights[best] + base).argmax(1)
    return float((guessed == labels[~is_fitted]).double().mean())
