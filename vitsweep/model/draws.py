"""Random choices of a forward pass that are the same whenever it is repeated (needs torch)."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.initialize import named_generator, named_seed


class Draws:
    """Gives each forward pass of a replica's training random numbers of its own.

    They follow from the seed, the replica, the optimizer step and the number of the forward pass in
    it, and from nothing else: the ranks that share an image and the stages of a pipeline draw alike,
    and a training that is resumed draws what the uninterrupted one would.

    Attributes:
        seed: of the cell.
        replica: which share of the images this rank sees.
        step: optimizer step.
    """

    def __init__(self, seed: int, replica: int = 0) -> None:
        self.seed, self.replica, self.step = seed, replica, 0
        self._begun = 0

    def begin(self, step: int) -> None:
        """Let the next forward pass be the first one of an optimizer step."""
        self.step = step
        self._begun += 1

    def uniform(
        self, owner: nn.Module, purpose: str, size: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Return float32 numbers of [0, 1) on the device of `like`, the next ones of `owner`.

        Args:
            owner: whose forward passes are counted: a model, or a stage of one. One without
                gradients (it looks for shapes) does not count.
            purpose: of the numbers; each has its own.
            size: of what is returned.
            like: a tensor on the device.
        """
        begun, number = vars(owner).get(f"drawn_{purpose}", (self._begun, 0))
        if begun != self._begun:
            number = 0
        if torch.is_grad_enabled():
            vars(owner)[f"drawn_{purpose}"] = (self._begun, number + 1)
        name = f"{purpose} {self.replica} {self.step} {number}"
        generator = named_generator(self.seed, name, like.device)
        return torch.rand(size, generator=generator, device=like.device, dtype=torch.float32)

    @contextmanager
    def default_generators(self, device: torch.device) -> Iterator[None]:
        """Give modules that are not ours, such as `nn.Dropout`, the numbers of this replica and step.

        Inside torch's default generators and Python's `random` follow from what all draws follow from;
        afterwards they are as before.
        """
        python_state = random.getstate()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed = named_seed(self.seed, f"default {self.replica} {self.step}")
            torch.manual_seed(seed)
            random.seed(seed)
            try:
                yield
            finally:
                random.setstate(python_state)


def chosen(numbers: Tensor, count: int) -> Tensor:
    """Return the places of the `count` smallest numbers along the last axis, ascending."""
    return numbers.argsort(-1)[..., :count].sort(-1).values


# Random subsets of the patches of each image (needs torch).


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
