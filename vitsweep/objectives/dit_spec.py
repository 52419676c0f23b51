"""Shapes of diffusion transformers: DiT for images, STDiT for videos."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Gt

from vitsweep.objectives.diffusion_spec import SINUSOIDS, DiffusionSpec
from vitsweep.spec.model_spec import VideoViTSpec

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class DiTSpec(DiffusionSpec):
    """A Diffusion Transformer for images, told labels by adaLN-zero (Peebles and Xie, arXiv:2212.09748)."""

    def own_network(self, resolution_px: int) -> Any:
        """Build a `DiT`."""
        from vitsweep.objectives.dit import DiT

        return DiT(self, resolution_px=resolution_px)

    def own_parameters(self) -> int:
        """Those with a table of labels, and modulations in each block and at the end."""
        labels = (self.num_classes + 1) * self.width
        modulations = (6 * self.depth + 2) * self.width * (self.width + 1)
        return self._linear_parameters + labels + modulations

    def products_of_conditions(self, resolution_px: int) -> tuple[int, int]:
        """The time's second linear and all modulations; its first linear."""
        return (6 * self.depth + 3) * self.width**2, SINUSOIDS * self.width

    def num_patches(self, resolution_px: int) -> int:
        """Of one image."""
        return (resolution_px // self.patch_px) ** 2

    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """Patches."""
        return self.num_patches(resolution_px)

    def sequence_lengths(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """One axis with all patches."""
        return (self.num_tokens(resolution_px, pooling),)

    def attended_tokens(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """All of them, in every block."""
        return (self.num_tokens(resolution_px, pooling),) * self.depth

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image, or the latents of one."""
        return (self.in_channels, resolution_px, resolution_px)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse layouts of a ViT's tokens and images."""
        yield from super().conflicts(cell)
        if not cell.layout.batch_first or cell.layout.channels_last:
            yield (
                f"`layout={cell.layout.name}` orders the axes of a ViT, and those of `model={self.name}` are "
                "(B, T, D): use `layout=batch_first` with `layout.channels_last=false`."
            )


@dataclass(frozen=True, kw_only=True)
class STDiTSpec(DiffusionSpec, VideoViTSpec):
    """A spatial-temporal DiT for videos, which reads text by cross-attention (STDiT3 of Open-Sora 1.2).

    Blocks attend along space and along time in turn. A label is a text of one vector.

    Attributes:
        text_width: size of a vector of text, which two linears bring to `width`; null for labels.
        text_vectors: of the longest text.
    """

    text_width: Annotated[int, Gt(0)] | None
    text_vectors: Annotated[int, Gt(0)]

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Read short and narrow texts."""
        narrow = self.text_width and min(self.text_width, 32)
        vectors = min(self.text_vectors, 5)
        twin = super().twin(depth, num_classes, unit)
        return replace(twin, text_width=narrow, text_vectors=vectors)

    def own_network(self, resolution_px: int) -> Any:
        """Build an `STDiT`."""
        from vitsweep.objectives.stdit import STDiT

        return STDiT(self, resolution_px=resolution_px)

    @property
    def block_linears(self) -> tuple[tuple[int, int], ...]:
        """Those of a ViT's block, and queries and outputs of cross-attention."""
        own = (self.width, self.width)
        return (*super().block_linears, own, own)

    def own_parameters(self) -> int:
        """Those with the frame rate, one modulation, its tables, the text, and norms of queries and keys."""
        width = self.width
        keys_and_values = 2 * width * (width + 1)
        block = 6 * width + keys_and_values + 2 * (width // self.num_heads)
        frame_rate = (SINUSOIDS + 1 + width + 1) * width
        text = (self.num_classes + 1) * width
        if self.text_width:  # two linears, and the text of those without one
            text = (self.text_width + width + 2) * width + self.text_vectors * self.text_width
        last = 2 * width
        beside = frame_rate + 6 * width * (width + 1) + text + last
        return self._linear_parameters + self.depth * block + beside

    def products_of_conditions(self, resolution_px: int) -> tuple[int, int]:
        """Modulation, text, its keys and values, attention to it; first linears of time and frame rate.

        All texts count as the longest one, as they are computed unless they are packed.
        """
        width, tokens, vectors = self.width, self.num_patches(resolution_px), self.text_vectors
        block = 2 * width * vectors * (width + tokens)
        text = vectors * width * (self.text_width + width) if self.text_width else 0
        # The frame rate is the same for all images, and counts as one image's.
        return self.depth * block + text + (6 + 1 + 1) * width**2, 2 * SINUSOIDS * width

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a module in the place of attention, which knows no norms and turns of queries and keys."""
        yield from super().conflicts(cell)
        if cell.attention.name == "mha_module":
            yield (
                f"`attention=mha_module` norms and turns no queries and keys, as `model={self.name}` does: "
                "use `attention=sdpa_auto`."
            )
        if (
            getattr(cell.attention, "text", "masked") == "packed"
            and cell.compilation.scope != "nothing"
        ):
            yield (
                "`attention.text=packed` has other shapes in each step, which "
                f"`compilation={cell.compilation.name}` would compile anew: use `compilation=eager`."
            )
