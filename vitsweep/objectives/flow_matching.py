"""Noise to data along straight lines: a network predicts the velocity of noisy images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from vitsweep.objectives.diffusion_spec import LATENT_SIDE, DiffusionSpec
from vitsweep.spec.objective import Objective

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class FlowMatching(Objective):
    """Rectified flow (arXiv:2209.03003), as Open-Sora trains it (VideoSys, `RFLOW`).

    x_t = (1 - t) x + t e of data x and noise e; the network sees x_t, 1000 t and the condition, and its first
    channels are to be x - e: mean square over all numbers, in float32.

    Attributes:
        times: t is the sigmoid of a standard normal number, or uniform in [0, 1).
        shift: move times by the size of the input, as Open-Sora does: towards noise where it is larger than
            the latents of one image of 512 px, 64 x 64.
        dropped: share of the images whose condition is left out, for classifier-free guidance.
    """

    draws: ClassVar[bool] = True
    gives_context: ClassVar[bool] = True
    scores: ClassVar[dict[str, Literal["higher", "lower"]]] = {"held_out_loss": "lower"}

    times: Literal["logit_normal", "uniform"]
    shift: bool
    dropped: Annotated[float, Ge(0), Lt(1)]

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse augmentations, which are those of classifiers."""
        yield from super().conflicts(cell)
        if cell.task.epochs and cell.recipe.augments and not cell.recipe.mixes:
            yield (
                f"`recipe={cell.recipe.name}` distorts images, which `objective={self.name}` is to learn as "
                "they are: use `recipe=none`."
            )

    def time_ratio(self, cell: "CellSpec") -> float:
        """Return r of t <- r t / (1 + (r - 1) t); 1 leaves times as they are.

        The source counts frames of pixels, of which its VAE makes 5 of 17; frames here are latents already.
        """
        if not self.shift:
            return 1.0
        return float(cell.batch.resolution_px / LATENT_SIDE * cell.model.frames_per_input**0.5)

    def train_flops(self, cell: "CellSpec") -> int | None:
        """Return those of the network: the loss has no products."""
        shape = cell.transformer
        assert isinstance(shape, DiffusionSpec)
        return shape.train_flops(cell.batch.resolution_px, cell.attention.attention_pattern)

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return the velocity's loss."""
        from vitsweep.objectives.velocity import Velocity

        return Velocity(cell)
