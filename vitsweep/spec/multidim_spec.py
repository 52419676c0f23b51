"""Shapes of transformers whose tokens lie along two axes, with attention along one at a time."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt

from vitsweep.spec.model_spec import TransformerSpec

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class MultiDimSpec(TransformerSpec):
    """Tokens (X, Y); even blocks attend along Y, odd ones along X.

    The head reads the mean over all tokens; there is no class token under either classifier.
    """

    head: Literal["classify"]

    @abstractmethod
    def grid(self, resolution_px: int) -> tuple[int, int]:
        """Return the tokens along X and along Y."""

    @property
    def num_sequence_axes(self) -> int:
        """X and Y."""
        return 2

    @property
    def frames_per_patch(self) -> int:
        """Images that one patch covers."""
        return 1

    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """X times Y."""
        x, y = self.grid(resolution_px)
        return x * y

    def sequence_lengths(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """X and Y."""
        return self.grid(resolution_px)

    def attended_tokens(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """Y, X, Y, X, ..."""
        x, y = self.grid(resolution_px)
        return tuple(x if block % 2 else y for block in range(self.depth))

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse layouts of a plain ViT, (B, T, D) or (T, B, D): tokens are (B, X, Y, D) here."""
        yield from super().conflicts(cell)
        if not cell.layout.batch_first or cell.layout.channels_last:
            yield (
                f"`layout={cell.layout.name}` orders the axes of a plain ViT; "
                f"`model={self.name}` moves the axis it attends along in every block: use "
                "`layout=batch_first` with `layout.channels_last=false`."
            )


@dataclass(frozen=True, kw_only=True)
class VideoViTSpec(MultiDimSpec):
    """A spatial-temporal ViT over (B, T, S, D): a spatial block, a temporal one, and so on.

    Each block has attention and an MLP, as in Latte (arXiv:2401.03048, variant 1); ViViT's model 3
    (arXiv:2103.15691) and OpenSora's ST blocks share one MLP between a pair of attentions.

    Attributes:
        frames: of a video.
        tubelet_frames: that one token covers (ViViT, section 3.2); T = frames / tubelet_frames.
    """

    frames: Annotated[int, Gt(0)]
    tubelet_frames: Annotated[int, Gt(0)]

    @property
    def frames_per_input(self) -> int:
        """Frames."""
        return self.frames

    @property
    def frames_per_patch(self) -> int:
        """Frames of a tubelet."""
        return self.tubelet_frames

    def grid(self, resolution_px: int) -> tuple[int, int]:
        """T and S."""
        return self.frames // self.tubelet_frames, (resolution_px // self.patch_px) ** 2

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One video."""
        return (self.in_channels, self.frames, resolution_px, resolution_px)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse single images, and frames that tubelets do not divide."""
        yield from super().conflicts(cell)
        if self.frames == 1:
            yield (
                f"`model={self.name}` takes videos, and `data={cell.data.name}` gives single "
                "images: use `data=moving_digits` or `data=synthetic_video`, or an `axial_vit_*` "
                "for images."
            )
        if self.frames % self.tubelet_frames:
            yield (
                f"`model.frames={self.frames}` is not divisible by "
                f"`model.tubelet_frames={self.tubelet_frames}`: try `model.tubelet_frames=1`."
            )


@dataclass(frozen=True, kw_only=True)
class AxialViTSpec(MultiDimSpec):
    """An image ViT whose blocks attend within rows, then within columns (arXiv:1912.12180)."""

    def grid(self, resolution_px: int) -> tuple[int, int]:
        """Rows and columns."""
        return (resolution_px // self.patch_px,) * 2

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image."""
        return (self.in_channels, resolution_px, resolution_px)
