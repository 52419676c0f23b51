import pytest
import torch

from tests.shapes import NANO, replace
from vitsweep.model.transformers_weights import load_transformers_weights, translated
from vitsweep.model.vit import ViT

transformers = pytest.importorskip("transformers", reason="pip install transformers")

SPEC = replace(NANO, in_channels=3, num_classes=7, patch_px=4, norm_eps=1e-6)


def theirs() -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=SPEC.width,
        num_hidden_layers=SPEC.depth,
        num_attention_heads=SPEC.num_heads,
        intermediate_size=SPEC.mlp_width,
        layer_norm_eps=SPEC.norm_eps,
        image_size=16,
        patch_size=SPEC.patch_px,
        num_channels=SPEC.in_channels,
        num_labels=SPEC.num_classes,
    )
    model = transformers.ViTForImageClassification(config).eval()
    for parameter in model.parameters():  # theirs starts with zeros where an error would not show
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("batch_first", [True, False])
def test_logits_equal_those_of_transformers(batch_first):
    torch.manual_seed(0)
    peer, images = theirs(), torch.randn(3, 3, 16, 16)
    ours = ViT(SPEC, resolution_px=16, pooling="token", batch_first=batch_first)

    load_transformers_weights(ours, peer.state_dict())

    with torch.no_grad():
        torch.testing.assert_close(ours(images), peer(images).logits, rtol=0, atol=1e-5)


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError):
        translated({"vit.embeddings.mask_token": torch.zeros(1)})


def test_a_missing_name_is_listed():
    weights = theirs().state_dict()
    del weights["classifier.bias"]

    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        load_transformers_weights(ViT(SPEC, resolution_px=16, pooling="token"), weights)
