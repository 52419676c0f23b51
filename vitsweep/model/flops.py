"""FLOPs and parameters of one model, from its shape alone (no torch).

One multiply-add counts as two FLOPs; only matrix products count (the convention of PaLM,
arXiv:2204.02311, appendix B): norms, GELU, softmax, biases and residuals are left out.

Two counts are kept apart. Model FLOPs (`train_flops`) are what the mathematics asks for and give
the MFU. What hardware does on top (`recomputed_block_flops`, `recomputed_score_flops`) gives the
HFU. torch's `FlopCounterMode` counts hardware FLOPs: five products in the backward pass of a fused
attention kernel, one of which computes q k^T again, where the mathematics has four.
"""

from typing import Literal

from vitsweep.spec.model_spec import ModelSpec, ViTSpec
from vitsweep.spec.multidim_spec import MultiDimSpec

Pooling = Literal["token", "mean"]


def forward_flops(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """FLOPs of one image, forward."""
    blocks = _blocks_flops(spec, resolution_px, pooling)
    return _patch_flops(spec, resolution_px) + blocks + _head_flops(spec, resolution_px)


def train_flops(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """FLOPs of one image, forward and backward.

    The backward pass has two products for each one forward, by input and by weight. Images need no
    gradient, so that the patch embedding has only the second.
    """
    forward = forward_flops(spec, resolution_px, pooling)
    return 3 * forward - _patch_flops(spec, resolution_px)


def recomputed_block_flops(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """FLOPs of one image that the backward pass repeats where every block is recomputed.

    The last product of a block is not repeated: its result is not needed, its inputs are, and torch
    stops a recomputation as soon as it has all that the backward pass reads.
    """
    last = 2 * spec.num_tokens(resolution_px, pooling) * spec.width * spec.mlp_width
    return _blocks_flops(spec, resolution_px, pooling) - spec.depth * last


def recomputed_score_flops(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """FLOPs of one image for q k^T again in the backward pass of fused attention kernels.

    FlashAttention (arXiv:2205.14135) and its relatives do not keep the scores.
    """
    tokens = spec.num_tokens(resolution_px, pooling)
    return 2 * tokens * sum(spec.attended_tokens(resolution_px, pooling)) * spec.width


def num_parameters(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """Count the parameters; the position embedding makes them depend on the resolution."""
    width = spec.width
    filters = spec.in_channels * spec.patch_px**2 * width * _frames_per_patch(spec)
    filter_biases = width * (spec.in_channels if _has_channel_tokens(spec) else 1)
    class_token = width * spec.has_class_token(pooling)
    attention = 4 * width * width + 4 * width
    mlp = 2 * width * spec.mlp_width + spec.mlp_width + width
    blocks = spec.depth * (attention + mlp + 4 * width)
    head = (width + 1) * _head_width(spec)
    return (
        filters
        + filter_biases
        + class_token
        + _positions(spec, resolution_px, pooling) * width
        + blocks
        + 2 * width
        + head
    )


def _blocks_flops(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    tokens, width = spec.num_tokens(resolution_px, pooling), spec.width
    linears = 4 * width * width + 2 * width * spec.mlp_width
    scores_and_values = 2 * width * sum(spec.attended_tokens(resolution_px, pooling))
    return 2 * tokens * (spec.depth * linears + scores_and_values)


def _patch_flops(spec: ModelSpec, resolution_px: int) -> int:
    pixels = (resolution_px // spec.patch_px * spec.patch_px) ** 2 * spec.frames_per_input
    return 2 * pixels * spec.in_channels * spec.width


def _head_flops(spec: ModelSpec, resolution_px: int) -> int:
    vectors = (resolution_px // spec.patch_px) ** 2 if spec.head == "dense" else 1
    return 2 * vectors * spec.width * _head_width(spec)


def _head_width(spec: ModelSpec) -> int:
    return spec.num_classes * (spec.patch_px**2 if spec.head == "dense" else 1)


def _positions(spec: ModelSpec, resolution_px: int, pooling: Pooling) -> int:
    """Learned positions: one per token, or one per place along each of two axes."""
    if isinstance(spec, MultiDimSpec):
        return sum(spec.grid(resolution_px))
    return spec.num_tokens(resolution_px, pooling)


def _frames_per_patch(spec: ModelSpec) -> int:
    return spec.frames_per_patch if isinstance(spec, MultiDimSpec) else 1


def _has_channel_tokens(spec: ModelSpec) -> bool:
    return isinstance(spec, ViTSpec) and spec.tokens_per_channel
