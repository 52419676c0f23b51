"""Shapes of models, and what follows from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

DERIVED = {"derived": True, "identity": False}
"""Metadata of a field that techniques set, and nobody types."""


MEAN_OVER_PARTS = "the loss is a mean over parts"
"""What `proved` says where micro-batches and replicas count differently, and each weighs alike."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """The shape of a model.

    Attributes:
        in_channels: channels of an image.
        num_classes: labels.
        head: always `classify`; it keeps the ids of cells from when fields were predicted.
    """

    colour: ClassVar[int] = 3

    name: str
    in_channels: Annotated[int, Gt(0)]
    num_classes: Annotated[int, Gt(0)]
    head: Literal["classify"] = "classify"

    norms_over_batch: ClassVar[bool] = False
    """True where an image's result depends on the others of its micro-batch (BatchNorm)."""

    draws_by_itself: ClassVar[bool] = False
    """True where its modules may draw from torch's default generators (dropout)."""

    @abstractmethod
    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """Shape of one input without the batch: (C, H, W), or (C, frames, H, W)."""

    @abstractmethod
    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Return this kind of model in a few kilobytes, with `depth` blocks (see `equivalence`).

        Widths keep their remainders modulo `unit`, so that shards are padded where the model's are.
        """

    @property
    @abstractmethod
    def twin_resolution_px(self) -> int | None:
        """Side of the images that the twin trains on; None for that of the cell."""

    @property
    def title(self) -> str:
        """The name in tables: as typed, or of a function of the user's."""
        return self.name

    @property
    def code_modules(self) -> tuple[str, ...]:
        """Modules outside of vitsweep that build the model, for the hash of the code."""
        return ()

    def num_tokens(self, resolution_px: int, pooling: str) -> int | None:
        """Tokens of one image or video as the blocks see them; None where there are none."""
        return None

    @property
    def frames_per_input(self) -> int:
        """Images of one input: 1, or the frames of a video."""
        return 1

    def has_class_token(self, pooling: str) -> bool:
        """Whether a learned token goes in front of the patches."""
        return False

    def own_loss(self) -> "Callable[[Any, Any], Any] | None":
        """Return (outputs, batch) -> mean loss, instead of the cross entropy; None for that."""
        return None

    def own_count(self) -> "Callable[[Any], Any] | None":
        """Return (batch) -> over how many values `own_loss` is a sum; None where it is a mean."""
        return None

    def example(self, num_images: int, resolution_px: int, seed: int) -> Any:
        """Return a batch as data that give mappings have it; None where batches are images and labels."""
        return None

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Return group -> reason for choices that this kind of model has no place for.

        The `conflicts` of such a technique are not called.
        """
        return {}

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Yield reasons why this model cannot run in `cell`."""
        frames, needed = getattr(cell.data, "num_frames", 1), self.frames_per_input
        if frames != needed:
            yield (
                f"`data={cell.data.name}` gives {_images(frames)} and `model={self.name}` takes "
                f"{_images(needed)}: use a `video_vit_*` with `model.frames=auto` for "
                "`data=moving_digits` and `data=synthetic_video`, another model for images."
            )


def refused_with_own_loss(cell: "CellSpec", knob: str) -> Iterator[str]:
    """Yield what knows no batches but images and labels, and no loss but their cross entropy.

    Args:
        cell: with a loss of its own, or batches that are mappings.
        knob: how these were given.
    """
    for typed in with_equal_parts(cell):
        yield (
            f"`{typed}` works with the cell's own loss of images and labels alone: leave out what gives "
            f"others, `{knob}`, or use another choice."
        )


def with_equal_parts(cell: "CellSpec") -> list[str]:
    """Return the choices, as typed, whose shapes are fixed: batches of one length, in equal parts."""
    reasons = {
        f"pipeline_parallel={cell.pipeline_parallel.name}": cell.mesh.pipeline > 1,
        f"precision={cell.precision.name}": cell.precision.float8,
    }
    return [typed for typed, is_chosen in reasons.items() if is_chosen]


TWIN_WIDTH_PER_HEAD = 16


def least_alike(number: int, least: int, unit: int) -> int:
    """Return the smallest number from `least` on that has the same remainder modulo `unit`."""
    return least + (number - least) % unit


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(ModelSpec):
    """The shape of a transformer: pre-norm blocks over patches.

    Attributes:
        depth: number of blocks.
        width: D, the size of a token.
        num_heads: H; `width` must be a multiple of it.
        mlp_width: hidden size of the MLP.
        patch_px: side of a patch in pixels.
        norm_eps: epsilon of LayerNorm.
        mlp: `gelu`, two matrices, or `swiglu`, three: down(silu(gate x) * (up x)) (arXiv:2002.05202).
        layer_scale: first value of a learned factor per channel on what each branch adds (LayerScale,
            arXiv:2103.17239); null for none.
        computed_images: (kept, all) images of a forward pass that each block computes.
        parallel_branches: attention and MLP read one norm, instead of one each.
    """

    norm_eps: Annotated[float, Gt(0)]
    depth: Annotated[int, Gt(0)]
    width: Annotated[int, Gt(0)]
    num_heads: Annotated[int, Gt(0)]
    mlp_width: Annotated[int, Gt(0)]
    patch_px: Annotated[int, Gt(0)]
    mlp: Literal["gelu", "swiglu"]
    layer_scale: Annotated[float, Gt(0)] | None
    computed_images: tuple[int, int] = field(default=(1, 1), metadata=DERIVED)
    parallel_branches: bool = field(default=False, metadata=DERIVED)

    @abstractmethod
    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """Tokens of one image or video as the blocks see them."""

    @abstractmethod
    def attended_tokens(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """To how many tokens each token attends, block by block."""

    @abstractmethod
    def sequence_lengths(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """Tokens along each of the axes along which tokens lie; an image ViT has one."""

    @property
    def num_sequence_axes(self) -> int:
        """Number of axes along which tokens lie."""
        return 1

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Keep heads and patches, and the widths modulo `unit` and 16, which kernels ask for."""
        heads, least = self.num_heads, TWIN_WIDTH_PER_HEAD
        head_width = least_alike(self.width // heads, least, lcm(16, unit // gcd(unit, heads)))
        return replace(
            self,
            depth=max(2, depth),
            width=heads * min(head_width, self.width // heads),
            mlp_width=least_alike(self.mlp_width, 2 * least * heads, lcm(16, unit)),
            num_classes=num_classes,
            # As it starts, LayerScale would hide what branches compute.
            layer_scale=1.0 if self.layer_scale else None,
        )

    @property
    def mlp_matrices(self) -> int:
        """Matrices of (width, mlp_width) in an MLP."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def twin_resolution_px(self) -> int:
        """Four patches."""
        return 4 * self.patch_px

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse sides that patches do not divide, and widths that heads do not divide."""
        yield from super().conflicts(cell)
        side = cell.batch.resolution_px
        if side % self.patch_px:
            below = side - side % self.patch_px or self.patch_px
            larger = (
                "use `data=synthetic` or `data=image_folder`, or " if side < self.patch_px else ""
            )
            yield (
                f"`batch.resolution_px={side}` is not divisible by `model.patch_px={self.patch_px}`: "
                f"{larger}try `batch.resolution_px={below}`."
            )
        if self.width % self.num_heads:
            yield (
                f"`model.width={self.width}` is not divisible by `model.num_heads={self.num_heads}`: "
                "every head needs the same width."
            )


def _images(frames: int) -> str:
    return "single images" if frames == 1 else f"videos of {frames} frames"


@dataclass(frozen=True, kw_only=True)
class ViTSpec(TransformerSpec):
    """A pre-norm Vision Transformer (Dosovitskiy et al., arXiv:2010.11929).

    Attributes:
        tokens_per_channel: False; it keeps the ids of cells from when channels could have their own tokens.
        registers: learned tokens without a position, between class token and patches, which the head
            does not read (arXiv:2309.16588).
        position: `learned`; it keeps the ids of cells from when there were rotary ones.
        kept_patches: patches of an image that go through the blocks in training; None for all.
    """

    tokens_per_channel: Literal[False] = False
    registers: Annotated[int, Ge(0)]
    position: Literal["learned"] = "learned"
    kept_patches: int | None = field(default=None, metadata=DERIVED)

    def num_patches(self, resolution_px: int) -> int:
        """Patches of one image."""
        return (resolution_px // self.patch_px) ** 2

    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """Patches that are kept, registers, and one more where a class token is used."""
        patches = (
            self.num_patches(resolution_px) if self.kept_patches is None else self.kept_patches
        )
        return patches + self.registers + self.has_class_token(pooling)

    def sequence_lengths(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """One axis with all tokens."""
        return (self.num_tokens(resolution_px, pooling),)

    def attended_tokens(self, resolution_px: int, pooling: str) -> tuple[int, ...]:
        """All of them, in every block."""
        return (self.num_tokens(resolution_px, pooling),) * self.depth

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image."""
        return (self.in_channels, resolution_px, resolution_px)

    def has_class_token(self, pooling: str) -> bool:
        """The head reads it, or the mean over all tokens."""
        return pooling == "token"


# Shapes of transformers whose tokens lie along two axes, with attention along one at a time.


@dataclass(frozen=True, kw_only=True)
class MultiDimSpec(TransformerSpec):
    """Tokens (X, Y); even blocks attend along Y, odd ones along X.

    The head reads the mean over all tokens; there is no class token under either classifier.
    """

    num_sequence_axes: ClassVar[int] = 2  # X and Y

    @abstractmethod
    def grid(self, resolution_px: int) -> tuple[int, int]:
        """Return the tokens along X and along Y."""

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
        """Refuse layouts of an image ViT, (B, T, D) or (T, B, D): tokens are (B, X, Y, D) here."""
        yield from super().conflicts(cell)
        if not cell.layout.batch_first or cell.layout.channels_last:
            yield (
                f"`layout={cell.layout.name}` orders the axes of an image ViT; "
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
