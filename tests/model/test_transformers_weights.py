"""Our ViT computes what HF `transformers`' ViTForImageClassification computes with the same weights.

Both have pre-norm blocks, exact GELU, a class token, a final norm and one linear; `ViTSpec.norm_eps`
is the `layer_norm_eps` of their configuration (1e-12 in google's models).
"""

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.shapes import NANO, replace
from vitsweep.model.vit import ViT

SPEC = replace(NANO, in_channels=3, num_classes=7, patch_px=4, norm_eps=1e-6)

OUTER = {
    "vit.embeddings.patch_embeddings.projection.": "embedding.patch.",
    "vit.layernorm.": "norm.",
    "classifier.": "head.",
}
BLOCK = re.compile(r"vit\.(?:encoder\.layer|layers)\.(\d+)\.(.+\.)(weight|bias)")
INNER = {
    "layernorm_before.": "norm_attention.",
    "layernorm_after.": "norm_mlp.",
    # transformers 5
    "attention.o_proj.": "attention.out.",
    "mlp.fc1.": "mlp.up.",
    "mlp.fc2.": "mlp.down.",
    # transformers 4, and the checkpoints on the hub
    "attention.output.dense.": "attention.out.",
    "intermediate.dense.": "mlp.up.",
    "output.dense.": "mlp.down.",
}
QKV = {
    "attention.q_proj.": 0,
    "attention.k_proj.": 1,
    "attention.v_proj.": 2,
    "attention.attention.query.": 0,
    "attention.attention.key.": 1,
    "attention.attention.value.": 2,
}


def load_transformers_weights(model: ViT, weights: Mapping[str, Tensor]) -> None:
    """Copy the state dict of a ViTForImageClassification into `model` (pooling `token`)."""
    model.load_state_dict(translated(weights))


def translated(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` under our names, with q, k and v in one tensor."""
    ours: dict[str, Tensor] = {}
    thirds: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if name == "vit.embeddings.cls_token":
            ours["embedding.class_token"] = tensor[0, 0]
        elif name == "vit.embeddings.position_embeddings":
            ours["embedding.position"] = tensor[0]
        elif (match := BLOCK.fullmatch(name)) and match[2] in QKV:
            fused = f"blocks.{match[1]}.attention.qkv.{match[3]}"
            thirds.setdefault(fused, {})[QKV[match[2]]] = tensor
        elif match:
            ours[f"blocks.{match[1]}.{INNER[match[2]]}{match[3]}"] = tensor
        else:
            outer, kind = re.fullmatch(r"(.*\.)?(.*)", name).groups()  # type: ignore[union-attr]
            ours[OUTER[outer] + kind] = tensor
    for fused, parts in thirds.items():
        ours[fused] = torch.cat([parts[i] for i in range(3)])
    return ours


def theirs() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
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
