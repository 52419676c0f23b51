"""Random choices of a forward pass that are the same whenever it is repeated (needs torch)."""

import torch
from torch import Tensor, nn

from vitsweep.model.initialize import named_generator


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


def chosen(numbers: Tensor, count: int) -> Tensor:
    """Return the places of the `count` smallest numbers along the last axis, ascending."""
    return numbers.argsort(-1)[..., :count].sort(-1).values
