"""Cross entropy of logits and labels, and functions of the user's in its place (needs torch)."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from vitsweep.errors import VitsweepError
from vitsweep.model.module_look import logits_of
from vitsweep.objectives.base import Batch, OpenObjective, Pair, Step, Sum, as_given, described
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import imported_function

IGNORED = -100
"""The label of which `torch.nn.functional.cross_entropy` takes no notice."""

OwnCount = Callable[[Any], Any]
"""(batch) -> over how many values a loss is a sum: a number, or a tensor ()."""


class OfLabelledImages(OpenObjective):
    """What is scored by the labels of images."""

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels (B,), or shares of classes (B, classes): of a mapping the entry `data.label`."""
        name: Any = "label" if isinstance(batch, Pair) else getattr(self.cell.data, "label", None)
        found: Tensor = batch[name]
        return found

    def example(self, number: int, generator: torch.Generator) -> Batch:
        """Return images around a pattern for each class."""
        images, classes = super().example(number, generator)["image"], self.cell.model.num_classes
        labels = torch.randint(classes, (number,), generator=generator)
        fixed = torch.Generator().manual_seed(0)
        images += torch.randn((classes, *images.shape[1:]), generator=fixed)[labels]
        return Pair(image=images, label=labels)

    def score(self, outputs: Any, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Count the images whose label has the largest logit, and one of the five largest."""
        labels, logits = self.labels(batch), logits_of(outputs)
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
        return {
            "accuracy_top1": Sum(best[:, 0].sum(), len(best)),
            "accuracy_top5": Sum(best.sum(), len(best)),
        }


class CrossEntropy(OfLabelledImages):
    """Cross entropy of logits and labels; the mean over images."""

    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        """Return the mean, or the sum, over labels that are not ignored."""
        logits, labels = logits_of(outputs), self.labels(batch)
        if labels.is_floating_point():  # shares of the classes, of mixed images
            labels = labels.to(logits.dtype)
        return F.cross_entropy(
            logits,
            labels,
            label_smoothing=self.cell.task.label_smoothing,
            reduction="mean" if self.reduction == "mean" else "sum",
        )

    def reference(self) -> OpenObjective:
        """Return torch's cross entropy of whole batches."""
        return _PlainCrossEntropy(self.cell)


class CountedCrossEntropy(CrossEntropy):
    """The same over all labels of a step, where micro-batches may have different numbers of them."""

    reduction = "sum"

    def count(self, batch: Batch) -> Any:
        """Return the number of labels that are not ignored."""
        labels = self.labels(batch)
        if labels.is_floating_point():
            return labels.numel() // labels.shape[1]
        return (labels != IGNORED).sum()


class _PlainCrossEntropy(OfLabelledImages):
    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        smoothing = self.cell.task.label_smoothing
        return F.cross_entropy(logits_of(outputs), self.labels(batch), label_smoothing=smoothing)


class OwnLoss(OfLabelledImages):
    """A function of the user's, which gets batches as data or a loop give them.

    Args:
        cell: whose `data.label` scores a training.
        function: (outputs, batch) -> loss of a micro-batch: a mean, or with `count` a sum.
        count: (batch) -> over how many values that is a sum.
        weighs: without a count, let micro-batches weigh as they have images.
    """

    def __init__(
        self,
        cell: CellSpec,
        function: Callable[[Any, Any], Any],
        count: OwnCount | None = None,
        *,
        weighs: bool = False,
    ) -> None:
        super().__init__(cell)
        self._function, self._count = function, count
        self.reduction = "sum" if count else "weighted_mean" if weighs else "mean"

    @classmethod
    def named_by(cls, cell: CellSpec, *, weighs: bool = False) -> Self:
        """Import what a cell names.

        Raises:
            Exception: whatever importing a module raises, or there is no such name in it.
        """
        assert cell.loss_function is not None, "refused when the cell was made"
        count = imported_function(cell.loss_count) if cell.loss_count else None
        return cls(cell, imported_function(cell.loss_function), count, weighs=weighs)

    def count(self, batch: Batch) -> Any:
        """Return what the function for it says, or the number of images."""
        if self._count is None:
            return number_of_images(batch)
        count = self._count(as_given(batch))
        if isinstance(count, Real):  # NumPy's too
            return float(count)
        if not isinstance(count, Tensor) or count.shape:
            raise VitsweepError(
                f"The count of the loss returned {described(count)}, and it must be one number: over how "
                "many values of the micro-batch the loss is a sum, such as `mask.sum()`."
            )
        return count

    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        """Call the function.

        Raises:
            VitsweepError: it returns no tensor ().
        """
        loss = self._function(outputs, as_given(batch))
        if not isinstance(loss, Tensor) or loss.shape:
            kind = "sum" if self.reduction == "sum" else "mean"
            raise VitsweepError(
                f"The loss returned {described(loss)}, and it must be a tensor of one number without an "
                f"axis, the {kind} over the micro-batch: return `loss.{kind}()`."
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise VitsweepError(
                "The loss has no gradient: compute it from the outputs in torch, without `detach` or "
                "`torch.no_grad`."
            )
        return loss


def number_of_images(batch: Batch) -> int:
    """Return the length of a batch along the first axis."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
