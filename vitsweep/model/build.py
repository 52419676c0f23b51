"""From a cell to its plain model, before any technique wraps it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.block import Layer
from vitsweep.model.initialize import draw_norm_or_bias, draw_weights
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import build_module, look_of
from vitsweep.model.vit import MultiDimViT, ViT
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import MultiDimSpec, ViTSpec
from vitsweep.spec.resnet_spec import BottleneckShape, Convolution, ResNetSpec

# A residual network (He et al., arXiv:1512.03385), version 1.5, in the manner of torchvision's.


# Axes: B images, C channels, H x W pixels or places.


class NormedConvolution(nn.Module):
    """A convolution and its BatchNorm; without bias, which the norm would subtract."""

    def __init__(self, shape: Convolution, norm_eps: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(
            shape.inputs,
            shape.outputs,
            kernel_size=shape.kernel_px,
            stride=shape.stride,
            padding=shape.kernel_px // 2,
            bias=False,
        )
        self.norm = nn.BatchNorm2d(shape.outputs, eps=norm_eps)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve and normalise; (B, C, H, W) -> (B, outputs, ceil(H / stride), ...)."""
        return self.norm(self.convolution(x_BCHW))


class Bottleneck(Layer):
    """1x1 down, 3x3, 1x1 up; plus the input, through a 1x1 where the shape changes."""

    def __init__(self, shape: BottleneckShape, norm_eps: float) -> None:
        super().__init__()
        self.down, self.middle, self.up = (
            NormedConvolution(each, norm_eps) for each in shape.convolutions
        )
        self.shortcut = NormedConvolution(shape.shortcut, norm_eps) if shape.shortcut else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Transform (B, C, H, W) -> (B, C', ceil(H / stride), ceil(W / stride))."""
        inner = F.relu(self.middle(F.relu(self.down(x_BCHW))))
        kept = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        return F.relu(self.up(inner) + kept)


class ResNet(nn.Module):
    """Images (B, C, H, W) -> logits (B, num_classes).

    Args:
        spec: the shape.
        channels_last: filters lie in memory as (outputs, kernel, kernel, inputs); the images come
            so as well.

    Weights follow torch's seed; they are the same in either memory format.
    """

    def __init__(self, spec: ResNetSpec, *, channels_last: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.stem = NormedConvolution(spec.stem_convolution, spec.norm_eps)
        self.blocks = nn.ModuleList(Bottleneck(shape, spec.norm_eps) for shape in spec.bottlenecks)
        self.head = nn.Linear(spec.features, spec.num_classes)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.head.weight.is_meta:
            draw_weights(self)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Convolve, average over all places, read out."""
        x = F.relu(self.stem(images_BCHW))
        if self.spec.stem == "imagenet":
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))

    @staticmethod
    def draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw one weight in place.

        Filters after He et al. (arXiv:1502.01852), by fan-out as torchvision does. The head is
        normal with 0.01 (arXiv:1706.02677, section 5.1); norms start at one and zero.
        """
        if name.endswith("convolution.weight"):
            nn.init.kaiming_normal_(
                weight, mode="fan_out", nonlinearity="relu", generator=generator
            )
        elif name == "head.weight":
            nn.init.normal_(weight, std=0.01, generator=generator)
        else:
            draw_norm_or_bias(name, weight)


def build_model(cell: "CellSpec") -> nn.Module:
    """Build the model that `cell` trains; on torch's default device, in its default dtype.

    On `meta` it has shapes and no weights, until `model.initialize.materialize` draws them.
    """
    shape = cell.shape
    if isinstance(shape, ModuleSpec):
        return build_module(shape, cell.batch.resolution_px)
    if isinstance(shape, MultiDimSpec):
        return MultiDimViT(shape, resolution_px=cell.batch.resolution_px)
    if isinstance(shape, ResNetSpec):
        return ResNet(shape, channels_last=cell.layout.channels_last)
    assert isinstance(shape, ViTSpec)
    return ViT(
        shape,
        resolution_px=cell.batch.resolution_px,
        pooling=cell.classifier.pooling,
        batch_first=cell.layout.batch_first,
        channels_last=cell.layout.channels_last,
        linear_patches=cell.layout.patch_embedding == "linear",
    )


def first_model(cell: "CellSpec") -> nn.Module:
    """Build the model as a rank begins with it, from the cell's seed.

    Ours are on `meta`: each rank draws only the weights that it keeps. A module of the user's draws
    its weights itself, whole and on the host, the same on every rank.
    """
    torch.manual_seed(cell.seed)
    if isinstance(cell.model, ModuleSpec):
        look = look_of(cell.model, cell.batch.resolution_px)
        model = build_model(cell)
        vars(model)["unused_parameters"] = look.unused
        return model
    with torch.device("meta"):
        return build_model(cell)
