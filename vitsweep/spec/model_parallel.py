"""The kinds of technique that share the work on one image: over tokens, matrices, or blocks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any

from vitsweep.spec.technique import Technique

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


class ModelParallel(Technique):
    """Parallelism that sends activations: the work on one image is shared by several ranks."""

    @property
    def needs_transformer(self) -> bool:
        """All but `none`, which uses no axis of the mesh."""
        return bool(self.axes)


class SequenceParallel(ModelParallel):
    """Splits the tokens of one image over mesh axes; itself the default choice, which splits none."""

    colour = 6

    def unit(self, cell: "CellSpec") -> int:
        """Number of tokens that the first axis is padded to a multiple of."""
        return cell.mesh.sequence_parallel_size

    def tokens_per_rank(self, cell: "CellSpec") -> tuple[int, ...]:
        """Tokens of one image that a rank holds in each block, padding included.

        By default a share of the first axis, times the other one.
        """
        first, *rest = axis_lengths(cell)
        share = padded_share(first, cell.mesh.sequence_parallel_size, self.unit(cell))
        return (share * prod(rest),) * cell.transformer.depth

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Make every block work on this rank's share of the tokens."""
        return model

    def complete_gradients(self, model: "nn.Module", world: "World") -> None:
        """Sum gradients of which the sharding exchanged this rank's part only; most leave none."""


class TensorParallel(ModelParallel):
    """Splits the matrices of each block over the `tensor` axis of the mesh; itself splits none."""

    colour = 7

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block."""
        return model


class PipelineParallel(ModelParallel):
    """Splits the blocks over the `pipeline` axis of the mesh; itself the default choice, one stage.

    Attributes:
        microbatches: parts of a batch that follow one another through the stages.
    """

    colour = 0

    if TYPE_CHECKING:  # not at run time, where a field cannot override a property

        @property
        def microbatches(self) -> int: ...  # noqa: D102
    else:
        microbatches = 1

    def stage(
        self,
        model: "nn.Module",
        world: "World",
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> "nn.Module":
        """Return this rank's stage of the model; itself the whole model.

        Args:
            model: finished but for recomputation, compilation and sharding.
            world: ranks.
            forward_context: in which a forward pass runs (autocast).
        """
        return model

    def runner(self, stage: "nn.Module", criterion: Callable[..., Any], world: "World") -> Any:
        """Return a `techniques.pipeline_parallel.runner.PipelineRunner`; None where there is one stage.

        Args:
            stage: this rank's, as the sharding wrapped it.
            criterion: (outputs, labels) -> mean loss.
            world: ranks.
        """
        return None


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def axis_lengths(cell: "CellSpec") -> tuple[int, ...]:
    """Tokens along each axis of the model."""
    return cell.transformer.sequence_lengths(cell.batch.resolution_px, cell.classifier.pooling)


def padded_share(length: int, ranks: int, unit: int | None = None) -> int:
    """A rank's share of an axis that is padded to a multiple of `unit` (`ranks` if None)."""
    unit = unit or ranks
    return -(-length // unit) * unit // ranks
