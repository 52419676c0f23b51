"""FLOPs that torch's counter counts and the model's formulas leave out."""

from vitsweep.model import flops
from vitsweep.spec.model_spec import ModelSpec
from vitsweep.spec.technique import SOFTMAX, AttentionPattern


def recomputed_score_flops(
    spec: ModelSpec, side: int, pooling: flops.Pooling, pattern: AttentionPattern = SOFTMAX
) -> int:
    """Of one image, for q k^T again in the backward pass of fused kernels (arXiv:2205.14135)."""
    shape = flops._transformer(spec)
    return flops._of_computed_images(
        shape, 2 * shape.width * flops._pairs(shape, side, pooling, pattern)
    )
