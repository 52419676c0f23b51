"""Random subsets of the patches of each image (needs torch)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.draws import Draws, chosen


def drop_after_embedding(
    model: nn.Module, kept: Callable[[int], int], *, image_by_image: bool = False
) -> nn.Module:
    """Let the embedding of a model return a share of the patches in training.

    Args:
        model: with `embedding`, `draws`, and `spec`.
        kept: patches of an image -> how many of them stay.
        image_by_image: pick them by a slow loop.
    """
    vit: Any = model
    pick = _picked_one_by_one if image_by_image else _picked

    def drop(embedding: Any, inputs: object, tokens: Tensor) -> Tensor:
        if not embedding.training:
            return tokens
        x_BTD = tokens if vit.batch_first else tokens.transpose(0, 1)
        images, length, _ = x_BTD.shape
        first = embedding.num_prefix_tokens
        patches = length - first
        if (stay := kept(patches)) == patches:
            return tokens
        draws: Draws = vit.draws
        numbers = draws.uniform(embedding, "drop_tokens", (images, patches), tokens)
        places_BK = chosen(numbers, stay) + first
        prefix = torch.arange(first, device=tokens.device).expand(images, -1)
        kept_BKD = pick(x_BTD, torch.cat([prefix, places_BK], dim=1))
        return kept_BKD if vit.batch_first else kept_BKD.transpose(0, 1).contiguous()

    # A hook, because no name of a parameter may change. It runs before those that deal out tokens.
    vit.embedding.register_forward_hook(drop)
    return model


def _picked(x_BTD: Tensor, places_BK: Tensor) -> Tensor:
    images, length, _ = x_BTD.shape
    starts = torch.arange(images, device=x_BTD.device).unsqueeze(1) * length
    rows = (places_BK + starts).flatten()
    # Whole rows: `gather` would need an index for each number, and scatter gradients one by one.
    return x_BTD.flatten(0, 1).index_select(0, rows).unflatten(0, places_BK.shape)


def _picked_one_by_one(x_BTD: Tensor, places_BK: Tensor) -> Tensor:
    return torch.stack([x_BTD[image][places] for image, places in enumerate(places_BK)])
