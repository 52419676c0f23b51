"""FLOPs that torch's counter counts and the model's formulas leave out."""

from vitsweep.model import flops
from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.technique import SOFTMAX, AttentionPattern


def recomputed_score_flops(
    spec: TransformerSpec, side: int, pooling: flops.Pooling, pattern: AttentionPattern = SOFTMAX
) -> int:
    """Of one image, for q k^T again in the backward pass of fused kernels (arXiv:2205.14135)."""
    return flops._of_computed_images(
        spec, 2 * spec.width * flops._pairs(spec, side, pooling, pattern)
    )
