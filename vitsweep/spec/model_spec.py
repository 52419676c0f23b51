"""Shapes of models, and what follows from them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

DERIVED = {"derived": True, "identity": False}
"""Metadata of a field that techniques set, and nobody types."""


MOST_BLOCKS = 10_000
"""Of a transformer; published ones have up to 1,000."""
MEAN_OVER_PARTS = "the loss is a mean over each part"
"""What `proved` says where images count differently, and each micro-batch of each replica weighs alike."""


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

    has_context: ClassVar[bool] = False
    """True where its blocks read a time and conditions besides tokens, which an objective must give."""

    draws_by_itself: ClassVar[bool] = False
    """True where its modules may draw from torch's default generators (dropout)."""

    draws_its_weights: ClassVar[bool] = False
    """True where building it draws its first weights, whole and on the host."""

    may_lack_gradients: ClassVar[bool] = False
    """True where a step may use other parameters on each rank."""

    has_memory_formula: ClassVar[bool] = False
    """True where `planning.closed_memory` knows its memory."""

    linear_patches: ClassVar[bool] = False
    """True where its patches can be embedded by a product."""

    def own_network(self, resolution_px: int) -> Any:
        """Build the network of a kind that `model.build` does not know (needs torch)."""
        return None

    @abstractmethod
    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """Shape of one input without the batch: (C, H, W), or (C, frames, H, W)."""

    @abstractmethod
    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Return this kind of model in a few kilobytes, with `depth` blocks (see `proof`).

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


def needs_equal_parts(cell: "CellSpec", knob: str) -> Iterator[str]:
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
        norm_weights: whether norms have weights and biases of their own.
        gelu: approximation of GELU.
        computed_images: (kept, all) images of a forward pass that each block computes.
        parallel_branches: attention and MLP read one norm, instead of one each.
    """

    norm_eps: Annotated[float, Gt(0)]
    depth: Annotated[int, Gt(0), Le(MOST_BLOCKS)]
    width: Annotated[int, Gt(0)]
    num_heads: Annotated[int, Gt(0)]
    mlp_width: Annotated[int, Gt(0)]
    patch_px: Annotated[int, Gt(0)]
    mlp: Literal["gelu", "swiglu"]
    layer_scale: Annotated[float, Gt(0)] | None
    norm_weights: ClassVar[bool] = True
    gelu: ClassVar[Literal["none", "tanh"]] = "none"
    computed_images: tuple[int, int] = field(default=(1, 1), metadata=DERIVED)
    parallel_branches: bool = field(default=False, metadata=DERIVED)

    has_memory_formula: ClassVar[bool] = True

    @abstractmethod
    def num_patches(self, resolution_px: int) -> int:
        """Patches of one image or video."""

    @abstractmethod
    def num_learned_vectors(self, resolution_px: int, pooling: str) -> int:
        """Positions and tokens that are learned."""

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

    @property
    def frames_per_patch(self) -> int:
        """Images that one patch covers."""
        return 1

    def with_registers(self, count: int) -> Self:
        """Return the shape with so many more registers, where it can have any."""
        return self

    def with_kept_patches(self, kept: int) -> Self:
        """Return the shape whose blocks see so many patches in training, where some can be left out."""
        return self

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Refuse what hands tokens alone to blocks that read a context besides."""
        plain = {"vit_block": "plain", "tokens": "all", "pipeline_parallel": "none"}
        return {
            group: f"`{group}={getattr(cell, group).name}` hands blocks tokens alone, and those of "
            f"`model={self.name}` read a context besides: use `{group}={name}`."
            for group, name in plain.items()
            if self.has_context and getattr(cell, group).needs_transformer
        }

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
    def block_linears(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of those linears of a block that see tokens."""
        width, hidden = self.width, self.mlp_width
        up = (self.mlp_matrices - 1) * hidden
        return (3 * width, width), (width, width), (up, width), (width, hidden)

    def own_parameters(self) -> int | None:
        """Return the parameters of a kind that `model.flops` does not know."""
        return None

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

    linear_patches: ClassVar[bool] = True

    def with_registers(self, count: int) -> Self:
        """Add them to the model's own."""
        return replace(self, registers=self.registers + count)

    def with_kept_patches(self, kept: int) -> Self:
        """Keep so many."""
        return replace(self, kept_patches=kept)

    def num_learned_vectors(self, resolution_px: int, pooling: str) -> int:
        """A position for each patch, registers, and a class token with its position."""
        of_class = 2 * self.has_class_token(pooling)
        return of_class + self.registers + self.num_patches(resolution_px)

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

    def num_patches(self, resolution_px: int) -> int:
        """X times Y."""
        x, y = self.grid(resolution_px)
        return x * y

    def num_learned_vectors(self, resolution_px: int, pooling: str) -> int:
        """A position for each index along each of two axes."""
        return sum(self.grid(resolution_px))

    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """All patches."""
        return self.num_patches(resolution_px)

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
                "or `dit_*` for images."
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
