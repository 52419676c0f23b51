"""Weights of HF `transformers`' ViTForImageClassification, for ours.

The two are the same function: pre-norm blocks, exact GELU, class token, final norm, one linear.
`ViTSpec.norm_eps` must be the `layer_norm_eps` of their configuration (1e-12 in google's models).
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitsweep.model.vit import ViT

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
    """Copy the state dict of a ViTForImageClassification into `model` (pooling `token`).

    Raises:
        KeyError: a name that no ViTForImageClassification has.
        RuntimeError: names are missing, or a shape differs; torch lists all of them.
    """
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
