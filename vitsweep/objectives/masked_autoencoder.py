"""Images without most of their patches to these patches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Ge, Gt, Lt

from vitsweep.objectives.unlabelled import OfImageViT
from vitsweep.spec.model_spec import TWIN_WIDTH_PER_HEAD, ViTSpec
from vitsweep.spec.objective import Pass

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoder(OfImageViT):
    """Pixels of removed patches from the patches that are kept (He et al., arXiv:2111.06377).

    The encoder sees class token and kept patches. A linear takes them to the decoder's width, where a learned
    token stands for each removed patch. Positions are fixed sines and cosines in both, without a gradient.
    The loss is the mean square over the pixels of a patch, then over all removed patches.

    Attributes:
        kept_share: of the patches of each image; int(share x patches) are kept, a random subset.
        decoder_depth: blocks of the decoder.
        decoder_width: size of its tokens; its MLP is four times as wide.
        decoder_heads: of its attention.
        normalized_targets: targets are (x - mean) / sqrt(variance + 1e-6) of each patch.
    """

    draws: ClassVar[bool] = True

    kept_share: Annotated[float, Gt(0), Lt(1)]
    decoder_depth: Annotated[int, Gt(0)]
    decoder_width: Annotated[int, Gt(0)]
    decoder_heads: Annotated[int, Ge(1)]
    normalized_targets: bool

    def kept(self, patches: int) -> int:
        """Return how many patches of an image the encoder sees."""
        return int(self.kept_share * patches)

    def decoder(self, encoder: ViTSpec) -> ViTSpec:
        """Return the shape of the decoder's blocks."""
        return replace(
            encoder,
            depth=self.decoder_depth,
            width=self.decoder_width,
            num_heads=self.decoder_heads,
            mlp_width=4 * self.decoder_width,
            layer_scale=None,
        )

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse shares that keep no patch or all, widths that heads do not divide, patches of one number."""
        yield from super().conflicts(cell)
        width, heads = self.decoder_width, self.decoder_heads
        if width % heads or width % 4:
            yield (
                f"`objective.decoder_width={width}` must be a multiple of "
                f"`objective.decoder_heads={heads}` and of 4, for sines and cosines of two axes: use "
                f"`objective.decoder_width={4 * heads * max(1, width // (4 * heads))}`."
            )
        if cell.mesh.tensor > 1 and heads % cell.mesh.tensor:
            yield (
                f"`objective.decoder_heads={heads}` is not divisible by `mesh.tensor={cell.mesh.tensor}`: "
                "use another number of heads, or `tensor_parallel=none`."
            )
        spec = cell.model
        if not isinstance(spec, ViTSpec):
            return
        if spec.width % 4:
            yield (
                f"`model.width={spec.width}` is not divisible by 4, and `objective={self.name}` has sines "
                f"and cosines of two axes for positions: use `model.width={spec.width // 4 * 4 or 4}`."
            )
        patches = spec.num_patches(cell.batch.resolution_px)
        if patches and not self.kept(patches):
            yield (
                f"`objective.kept_share={self.kept_share:g}` of {patches} patches keeps none, and the "
                "encoder needs one: use `objective.kept_share=0.5`."
            )
        if self.normalized_targets and spec.patch_px**2 * spec.in_channels == 1:
            yield (
                f"`model.patch_px={spec.patch_px}` makes patches of one number, whose variance no target "
                "can be divided by: use larger patches, or `objective.normalized_targets=false`."
            )

    def twin(self) -> Self:
        """Two narrow blocks."""
        width = self.decoder_heads * TWIN_WIDTH_PER_HEAD
        return replace(self, decoder_depth=2, decoder_width=min(width, self.decoder_width))

    def passes(self, cell: "CellSpec") -> tuple[Pass, ...]:
        """The encoder over kept patches, then the decoder over all."""
        assert isinstance(cell.model, ViTSpec)
        patches = cell.model.num_patches(cell.batch.resolution_px)
        all_tokens = cell.num_tokens or 0
        removed = patches - self.kept(patches)
        return Pass(tokens=all_tokens - removed), Pass(tokens=all_tokens)

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return what masks, and adds a decoder."""
        from vitsweep.objectives.masked_patches import MaskedPatches

        return MaskedPatches(cell)
