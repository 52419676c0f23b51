import pytest
import torch

from tests.choices import choice
from vitsweep.model.flops import forward_flops, num_parameters
from vitsweep.model.vit import ViT

PUBLISHED_MILLIONS = {
    # At 224 px and 1,000 classes with a class token. Source; our count rounds to it.
    "vit_tiny": (5.7, 1),  # DeiT, arXiv:2012.12877, table 1
    "vit_small": (22, 0),  # the same
    "vit_base": (86, 0),  # the same (DeiT-B); 86.6 rounds up, the table cuts
    "vit_large": (304.3, 1),  # timm's vit_large_patch16_224; ViT's table 1 has 307 for its own head
    "vit_huge_14": (632, 0),  # ViT, arXiv:2010.11929, table 1
    "vit_giant_14": (1012.6, 1),  # timm's vit_giant_patch14_224
}
DINOV2_MILLIONS = {
    # At 518 px with 4 registers and without a head, as timm's vit_*_patch14_reg4_dinov2.
    "dinov2_small": (22.06, 2),
    "dinov2_base": (86.58, 2),
    "dinov2_large": (304.37, 2),
    "dinov2_giant": (1136.5, 1),
}
SHAPES = [*DINOV2_MILLIONS, *PUBLISHED_MILLIONS, "vit_huge_16", "vit_10b"]


def shape(name):
    return choice("model", name, in_channels=3, num_classes=1000)


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_parameters_equal_the_published_count(name):
    published, digits = PUBLISHED_MILLIONS[name]
    millions = num_parameters(shape(name), 224, "token") / 1e6

    assert millions == pytest.approx(published, abs=1 if name == "vit_base" else 0.5 * 10**-digits)


@pytest.mark.parametrize("name", DINOV2_MILLIONS)
def test_dinov2_has_the_published_parameters_without_a_head(name):
    published, digits = DINOV2_MILLIONS[name]
    spec = shape(name)
    body = num_parameters(spec, 518, "token") - 1000 * (spec.width + 1)

    assert body / 1e6 == pytest.approx(published, abs=0.5 * 10**-digits)


def test_the_model_has_the_parameters_that_its_shape_says():
    for name in SHAPES:
        with torch.device("meta"):
            model = ViT(shape(name), resolution_px=224, pooling="mean")

        assert sum(p.numel() for p in model.parameters()) == num_parameters(
            shape(name), 224, "mean"
        )


def test_vit_10b_has_ten_billion_parameters():
    assert num_parameters(shape("vit_10b"), 224, "mean") == pytest.approx(10e9, rel=0.01)


def test_flops_of_vit_base_equal_the_published_count():
    # 17.58 G multiply-adds (torchvision's vit_b_16); its counter includes both attention products.
    assert forward_flops(shape("vit_base"), 224, "token") / 2e9 == pytest.approx(17.58, rel=0.005)
