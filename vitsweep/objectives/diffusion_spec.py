"""What shapes of diffusion transformers share: their blocks read a time and conditions besides tokens."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from vitsweep.model.flops import blocks_flops, patch_flops
from vitsweep.spec.model_spec import DERIVED, TransformerSpec
from vitsweep.spec.technique import AttentionPattern

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

SINUSOIDS = 256
"""Numbers by which a network is told a time (`TimestepEmbedder` of DiT)."""

LATENT_SIDE = 64
"""Of the latents of images of 512 px, at which sources scale neither places nor times."""


@dataclass(frozen=True, kw_only=True)
class DiffusionSpec(TransformerSpec):
    """The shape of a network that predicts a velocity for every number of its input.

    Its outputs have twice the channels of its inputs, as the sources' have, which learn a variance too.

    Attributes:
        mlp: two matrices with GELU by tanh.
        layer_scale: none; gates follow from the time.
        zero_start: begin at zero where the source does. Twins do not: no gradient would pass.
    """

    has_context: ClassVar[bool] = True
    has_memory_formula: ClassVar[bool] = False
    norm_weights: ClassVar[bool] = False
    gelu: ClassVar[Literal["none", "tanh"]] = "tanh"

    mlp: Literal["gelu"] = "gelu"
    layer_scale: None = None
    zero_start: bool = field(default=True, metadata=DERIVED)

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Make it small, and draw what would begin at zero."""
        return replace(super().twin(depth, num_classes, unit), zero_start=False)

    def num_learned_vectors(self, resolution_px: int, pooling: str) -> int:
        """None: positions are fixed."""
        return 0

    @property
    def head_outputs(self) -> int:
        """Numbers that the last linear gives for a token: twice those of a patch."""
        return 2 * self.in_channels * self.frames_per_patch * self.patch_px**2

    def train_flops(self, resolution_px: int, pattern: AttentionPattern) -> int:
        """FLOPs of one input, forward and backward; times have no gradient, and neither have inputs."""
        patches = patch_flops(self, resolution_px)
        blocks = blocks_flops(self, resolution_px, "mean", pattern)
        head = self.num_patches(resolution_px) * self.width * self.head_outputs
        beside, fixed = self.products_of_conditions(resolution_px)
        return 2 * patches + 3 * (blocks + 2 * (head + beside)) + 4 * fixed

    @abstractmethod
    def products_of_conditions(self, resolution_px: int) -> tuple[int, int]:
        """Multiply-adds beside the tokens; and of more, whose inputs need no gradient."""

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Refuse what a classifier reads, too."""
        reason = (
            f"`classifier={cell.classifier.name}` is read by a classifier, and `model={self.name}` predicts "
            "a velocity for each patch: use `classifier=token`, which changes nothing here."
        )
        refused = super().refused(cell)
        return refused | ({"classifier": reason} if cell.classifier.needs_transformer else {})

    @property
    def _linear_parameters(self) -> int:
        """Weights and biases of patches, of the blocks' linears on tokens, of time and last linear."""
        patch = self.in_channels * self.frames_per_patch * self.patch_px**2
        blocks = sum(outputs * (inputs + 1) for outputs, inputs in self.block_linears)
        time = (SINUSOIDS + 1 + self.width + 1) * self.width
        head = self.head_outputs * (self.width + 1)
        return (patch + 1) * self.width + self.depth * blocks + time + head
