"""The kinds of technique that share the work on one image: over tokens, matrices, or blocks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vitsweep.spec.technique import AttentionPattern, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


class ModelParallel(Technique):
    """Parallelism that sends activations: the work on one image is shared by several ranks."""

    @property
    def needs_transformer(self) -> bool:
        """All but `none`, which uses no axis of the mesh."""
        return bool(self.axes)

    def sent_bytes_per_step(self, cell: "CellSpec") -> dict[str, float]:
        """Bytes that a rank sends for this technique in one step, mean over ranks, by purpose.

        The exact formula of this implementation: counters of a real step equal it.
        """
        return {}


class SequenceParallel(ModelParallel):
    """Splits the tokens of one image over mesh axes; itself the plain choice, which splits none."""

    colour = 6

    def tokens_per_rank(self, cell: "CellSpec") -> tuple[int, ...]:
        """Tokens of one image that a rank holds in each block, padding included."""
        tokens = cell.transformer.num_tokens(cell.batch.resolution_px, cell.classifier.pooling)
        return (tokens,) * cell.transformer.depth

    def attention_pattern(self, kernel: AttentionPattern) -> AttentionPattern:
        """Which tokens attend to which, given the kernel's own pattern; unchanged by most."""
        return kernel

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
    """Splits the blocks over the `pipeline` axis of the mesh; itself the plain choice, one stage.

    Attributes:
        microbatches: parts of a batch that follow one another through the stages.
        stages_per_rank: parts of the model on one rank.
    """

    colour = 0

    if TYPE_CHECKING:  # not at run time, where a field cannot override a property

        @property
        def microbatches(self) -> int: ...  # noqa: D102
        @property
        def stages_per_rank(self) -> int: ...  # noqa: D102
    else:
        microbatches = stages_per_rank = 1

    def stages(
        self,
        model: "nn.Module",
        world: "World",
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> "list[nn.Module]":
        """Return this rank's stages of the model; the whole model is one.

        Args:
            model: finished but for recomputation, compilation and sharding.
            world: ranks.
            forward_context: in which a forward pass runs (autocast).
        """
        return [model]

    def runner(
        self, stages: "list[nn.Module]", criterion: Callable[..., Any], world: "World"
    ) -> "PipelineRunner | None":
        """Return what runs a batch through all stages; None where there is but one.

        Args:
            stages: this rank's, as the sharding wrapped them.
            criterion: (outputs, labels) -> mean loss.
            world: ranks.
        """
        return None


class PipelineRunner(Protocol):
    """Forward and backward of a batch over all stages of a pipeline."""

    def run(
        self,
        images: "Tensor",
        labels: "Tensor",
        scale: "Callable[[Tensor], Tensor]",
        mark: Callable[[str], None],
    ) -> "Tensor":
        """Add the gradients of the scaled mean loss; return the mean loss itself, on every rank.

        `mark` is told where a phase ends: `forward` and `backward` after every chunk of a stage,
        `bubble` before, when the stage has waited for its turn.
        """

    def predict(self, images: "Tensor") -> "Tensor":
        """Return outputs without gradients, on every rank."""


# Sizes from which the formulas of communication volume are computed (no torch).


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Volume:
    """Sizes of the activations that a cell sends.

    Attributes:
        images: of one step and replica.
        block_images: of these, how many each block computes.
        width: D.
        stream: bytes of a number between blocks.
        inner: bytes of a number inside attention and MLP, half of `stream` under autocast.
        forwards: forward passes of a block per step: 2 under recomputation.
    """

    images: int
    block_images: int
    width: int
    stream: int
    inner: int
    forwards: int

    @classmethod
    def of(cls, cell: "CellSpec") -> "Volume":
        """Read the sizes off a cell."""
        plan, shape = cell.precision.plan(), cell.transformer
        kept, of = shape.computed_images
        images = cell.micro_batch * cell.batch.accumulation_steps
        return cls(
            images=images,
            block_images=images * kept // of,
            width=shape.width,
            stream=BYTES[plan.param_dtype],
            inner=BYTES[plan.autocast_dtype or plan.param_dtype],
            forwards=cell.memory.forwards_per_step,
        )

    @property
    def wide(self) -> int:
        """Bytes of a number where sums are kept: float32 at least."""
        return max(4, self.inner)


def remote_fraction(ranks: int) -> float:
    """(n - 1) / n: the share of a tensor that belongs to other ranks."""
    return (ranks - 1) / ranks
