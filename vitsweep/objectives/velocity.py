"""The loss of flow matching, and the same written slowly (needs torch)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitsweep.objectives.base import Batch, OpenObjective, Pair, Step, Sum
from vitsweep.objectives.diffusion_spec import SINUSOIDS
from vitsweep.objectives.positions import time_features
from vitsweep.spec.cell_spec import CellSpec

PER_TIME = 1000
"""The network is told 1000 t."""


class Velocity(OpenObjective):
    """Mean square between the first channels of the outputs and x - e.

    Times and their sinusoids are rounded from float64 to float32, in every precision: in bfloat16 1000 t
    would have steps of 4. So they are the same bits however images are dealt out.
    """

    def __init__(self, cell: CellSpec) -> None:
        super().__init__(cell)
        self.no_label, self.ratio = cell.model.num_classes, self.settings.time_ratio(cell)

    def example(self, number: int, generator: torch.Generator) -> Batch:
        """Return normally distributed inputs with labels, or with texts of all lengths."""
        model: Any = self.cell.model
        batch = super().example(number, generator)
        if getattr(model, "text_width", None):
            text = torch.randn(number, model.text_vectors, model.text_width, generator=generator)
            lengths = torch.arange(number) % model.text_vectors + 1
            return {**batch, "text": text, "text_length": lengths}
        return Pair(batch, label=torch.randint(self.no_label, (number,), generator=generator))

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Return noisy images with their times, conditions and velocities."""
        images = batch["image"].to(self.dtype)
        times_B = self.times(step, len(images))
        noise = step.noise("noise", *images.shape).to(self.dtype)
        t = times_B.to(self.dtype).view(-1, *[1] * (images.ndim - 1))
        return {
            "image": (1 - t) * images + t * noise,
            "time": time_features(PER_TIME * times_B.double(), SINUSOIDS).float().to(self.dtype),
            "velocity": images - noise,
        } | self.condition(batch, self.dropped(step, len(images)))

    def condition(self, batch: Batch, dropped_B: Tensor) -> dict[str, Tensor]:
        """Return the text or label of each image, and whose is left out."""
        if "text" in batch:
            named = {name: batch[name] for name in ("text", "text_length")}
            return named | {"dropped": dropped_B}
        return {"label": batch["label"].masked_fill(dropped_B, self.no_label)}

    def times(self, step: Step, images: int) -> Tensor:
        """Return t (B,), float32."""
        if self.settings.times == "uniform":
            t = step.uniform("times", images).double()
        else:
            t = step.normal("times", images).double().sigmoid()
        return (self.ratio * t / (1 + (self.ratio - 1) * t)).float()

    def dropped(self, step: Step, images: int) -> Tensor:
        """Return whose condition is left out (B,); of held-out images none."""
        if step.of_held_out:
            return torch.zeros(images, dtype=torch.bool, device=step.device)
        return step.uniform("dropped", images) < self.settings.dropped

    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        """Return the mean over images of the mean over their numbers."""
        return self._of_images(outputs, batch).mean()

    def score(self, outputs: Any, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Sum the mean square of each image, at the noise and time of its place."""
        of_images = self._of_images(outputs, batch)
        return {"held_out_loss": Sum(of_images.sum(), len(of_images))}

    def _of_images(self, outputs: Tensor, batch: Batch) -> Tensor:
        velocity = batch["velocity"].to(outputs.dtype)
        return (outputs[:, : velocity.shape[1]] - velocity).square().flatten(1).mean(1)

    def reference(self) -> OpenObjective:
        """Return the same, image by image."""
        return _ImageByImage(self.cell)


class _ImageByImage(Velocity):
    """Each image by itself, from the formulas; what is drawn is the same, since it is part of the problem."""

    def prepare(self, batch: Batch, step: Step) -> Batch:
        images, noise = batch["image"].to(self.dtype), step.noise("noise", *batch["image"].shape)
        is_uniform = self.settings.times == "uniform"
        numbers = (step.uniform if is_uniform else step.normal)("times", len(images)).tolist()
        lost = step.uniform("dropped", len(images)) < self.settings.dropped
        found: dict[str, list[Tensor]] = {n: [] for n in ("image", "time", "velocity")}
        for place, number in enumerate(numbers):
            t = number if is_uniform else 1 / (1 + math.exp(-number))
            t = torch.tensor(self.ratio * t / (1 + (self.ratio - 1) * t), dtype=torch.float32)
            turns = [1000 * float(t) / 10_000 ** (i / 128) for i in range(128)]
            features = torch.tensor(
                [*map(math.cos, turns), *map(math.sin, turns)], dtype=torch.float32
            )
            x, e, t = images[place], noise[place].to(self.dtype), t.to(images)
            found["image"].append((1 - t) * x + t * e)
            found["time"].append(features.to(images))
            found["velocity"].append(x - e)
        read = {n: batch[n] for n in ("text", "text_length") if n in batch} | {"dropped": lost}
        if "label" in batch:
            labels = zip(batch["label"].tolist(), lost.tolist(), strict=True)
            numbers = [self.no_label if gone else label for label, gone in labels]
            read = {"label": torch.tensor(numbers, device=images.device)}
        return {name: torch.stack(parts) for name, parts in found.items()} | read

    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        losses = []
        for image, velocity in zip(outputs, batch["velocity"], strict=True):
            predicted = [*image][: len(velocity)]
            squares = [((p - v) ** 2).sum() for p, v in zip(predicted, velocity, strict=True)]
            losses.append(torch.stack(squares).sum() / velocity.numel())
        return torch.stack(losses).mean()
