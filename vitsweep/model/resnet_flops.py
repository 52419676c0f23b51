"""FLOPs and parameters of a ResNet, from its shape alone (no torch).

The convention of `model.flops`: one multiply-add is two FLOPs, only convolutions and the head count.
"""

from vitsweep.spec.resnet_spec import Convolution, ResNetSpec


def forward_flops(spec: ResNetSpec, resolution_px: int) -> int:
    """FLOPs of one image, forward."""
    total, side = stem_flops(spec, resolution_px), _side_behind_the_stem(spec, resolution_px)
    for block in spec.bottlenecks:
        if block.shortcut:
            total += _flops(block.shortcut, side)
        for convolution in block.convolutions:
            total += _flops(convolution, side)
            side = _halved(side, convolution.stride)
    return total + 2 * spec.features * spec.num_classes


def stem_flops(spec: ResNetSpec, resolution_px: int) -> int:
    """FLOPs of the first convolution; images need no gradient, so that it has only one backward."""
    return _flops(spec.stem_convolution, resolution_px)


def num_parameters(spec: ResNetSpec) -> int:
    """Count the parameters: filters, two per normalised channel, the head with its bias."""
    convolutions = [spec.stem_convolution]
    for block in spec.bottlenecks:
        convolutions += [*block.convolutions, *([block.shortcut] if block.shortcut else [])]
    filters = sum(c.inputs * c.outputs * c.kernel_px**2 + 2 * c.outputs for c in convolutions)
    return filters + (spec.features + 1) * spec.num_classes


def _flops(shape: Convolution, side: int) -> int:
    places = _halved(side, shape.stride) ** 2
    return 2 * places * shape.kernel_px**2 * shape.inputs * shape.outputs


def _side_behind_the_stem(spec: ResNetSpec, resolution_px: int) -> int:
    side = _halved(resolution_px, spec.stem_convolution.stride)
    return _halved(side, 2) if spec.stem == "imagenet" else side


def _halved(side: int, stride: int) -> int:
    return -(-side // stride)
