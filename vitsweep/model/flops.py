"""FLOPs and parameters of one model, from its shape alone (no torch).

One multiply-add counts as two FLOPs; only matrix products count (the convention of PaLM,
arXiv:2204.02311, appendix B): norms, GELU, softmax, biases and residuals are left out.

Attention is counted as what it is (`spec.technique.AttentionPattern`). Softmax: the scores and the
sum of values, 4 D FLOPs for each pair of query and key. Under a causal mask only pairs that are not masked
count, T (T+1) / 2 of T^2, whatever a kernel computes and throws away (lower triangle, as in the MFU of USP,
arXiv:2405.07719; Megatron-LM's formula and torch's `FlopCounterMode` count the whole square). Linear
attention: each token is added to a state of (K, K) per head and reads it, 4 D K FLOPs per token,
causal or not; the scores within a chunk, by which a causal implementation gets along with few states,
do not count.

Model FLOPs (`train_flops`) are what the mathematics asks for and give the MFU. torch's `FlopCounterMode`
counts what hardware computes: recomputed blocks, and five products in the backward pass of a fused attention
kernel, one of which computes q k^T again, where the mathematics has four.
"""

from collections.abc import Callable
from typing import Literal

from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.technique import SOFTMAX, AttentionPattern

Pooling = Literal["token", "mean"]


def forward_flops(
    spec: TransformerSpec,
    resolution_px: int,
    pooling: Pooling,
    attention_pattern: AttentionPattern = SOFTMAX,
) -> int:
    """FLOPs of one image, forward."""
    blocks = blocks_flops(spec, resolution_px, pooling, attention_pattern)
    head = 2 * spec.width * spec.num_classes
    return patch_flops(spec, resolution_px) + blocks + head


def train_flops(
    spec: TransformerSpec,
    resolution_px: int,
    pooling: Pooling,
    attention_pattern: AttentionPattern = SOFTMAX,
) -> int:
    """FLOPs of one image, forward and backward.

    The backward pass has two products for each one forward, by input and by weight. Images need no
    gradient, so that the patch embedding has only the second.
    """
    forward = forward_flops(spec, resolution_px, pooling, attention_pattern)
    return 3 * forward - patch_flops(spec, resolution_px)


def train_flops_of_linears(
    spec: TransformerSpec, resolution_px: int, pooling: Pooling, chosen: Callable[[int, int], bool]
) -> int:
    """FLOPs of one image, forward and backward, in those linears of the blocks that `chosen` takes.

    Args:
        spec: the shape.
        resolution_px: side of an image.
        pooling: of the classifier.
        chosen: (outputs, inputs) -> whether a linear counts.
    """
    numbers = sum(
        outputs * inputs for outputs, inputs in spec.block_linears if chosen(outputs, inputs)
    )
    tokens = spec.num_tokens(resolution_px, pooling)
    return _of_computed_images(spec, 6 * tokens * spec.depth * numbers)


def num_parameters(spec: TransformerSpec, resolution_px: int, pooling: Pooling) -> int:
    """Count the parameters; the position embedding makes them depend on the resolution."""
    if (own := spec.own_parameters()) is not None:
        return own
    width = spec.width
    vectors = spec.num_learned_vectors(resolution_px, pooling)
    filters = spec.in_channels * spec.patch_px**2 * width * spec.frames_per_patch
    norms = 1 if spec.parallel_branches else 2
    attention = (4 * width + 4) * width
    mlp = (
        spec.mlp_matrices * width * spec.mlp_width
        + (spec.mlp_matrices - 1) * spec.mlp_width
        + width
    )
    scales = 2 * width if spec.layer_scale else 0
    blocks = spec.depth * (attention + mlp + 2 * norms * width + scales)
    head = (width + 1) * spec.num_classes
    return filters + (vectors + 3) * width + blocks + head


def blocks_flops(
    spec: TransformerSpec, resolution_px: int, pooling: Pooling, attention_pattern: AttentionPattern
) -> int:
    """FLOPs of one image in the blocks, forward: linears that see tokens, and self-attention."""
    tokens, width = spec.num_tokens(resolution_px, pooling), spec.width
    numbers = sum(outputs * inputs for outputs, inputs in spec.block_linears)
    linears = 2 * tokens * spec.depth * numbers
    if attention_pattern.linear:
        into_and_out_of_states = 4 * tokens * spec.depth * width * (width // spec.num_heads)
        return _of_computed_images(spec, linears + into_and_out_of_states)
    products = 4 * width * _pairs(spec, resolution_px, pooling, attention_pattern)
    return _of_computed_images(spec, linears + products)


def _of_computed_images(spec: TransformerSpec, flops: int) -> int:
    """Return the FLOPs of blocks per image, where a block computes some images of a batch only."""
    kept, images = spec.computed_images
    return flops * kept // images


def _pairs(
    spec: TransformerSpec, resolution_px: int, pooling: Pooling, attention_pattern: AttentionPattern
) -> int:
    """Pairs of query and key of one image, over all blocks, each of which attends along one axis."""
    tokens = spec.num_tokens(resolution_px, pooling)
    lengths = spec.attended_tokens(resolution_px, pooling)
    return sum(tokens // length * attention_pattern.pairs(length) for length in lengths)


def patch_flops(spec: TransformerSpec, resolution_px: int) -> int:
    """FLOPs of embedding the patches of one image, forward."""
    pixels = (resolution_px // spec.patch_px * spec.patch_px) ** 2 * spec.frames_per_input
    return 2 * pixels * spec.in_channels * spec.width
