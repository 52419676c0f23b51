"""Registers, SwiGLU and LayerScale as transformers has them in DINOv2."""

import pytest
import torch

from tests.choices import choice
from tests.shapes import NANO, assert_equal_step, build, replace

STACKS = ("encoder.layer.", "encoder.layers.", "layer.", "layers.", "model.layer.")
INNER = {
    "norm_attention": "norm1",
    "norm_mlp": "norm2",
    "attention.out": "attention.o_proj",
}
GELU = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
SWIGLU = {"mlp.down": "mlp.down_proj"}
SPEC = replace(NANO, registers=2, layer_scale=1e-5, num_classes=7, mlp_width=64)


def theirs(spec):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=spec.width, num_hidden_layers=spec.depth, num_attention_heads=spec.num_heads,
        # They take 2/3 of it for SwiGLU, rounded up to a multiple of 8.
        mlp_ratio=3 if spec.mlp == "swiglu" else 2, use_swiglu_ffn=spec.mlp == "swiglu",
        layer_norm_eps=spec.norm_eps, image_size=8, patch_size=spec.patch_px, num_channels=3,
        num_register_tokens=spec.registers,
    )  # fmt: skip
    model = transformers.Dinov2WithRegistersModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def translated(weights, depth):
    """Their weights under our names, without a head."""
    ours = {
        "embedding.class_token": weights["embeddings.cls_token"][0, 0],
        "embedding.position": weights["embeddings.position_embeddings"][0],
        "embedding.registers": weights["embeddings.register_tokens"][0],
    }
    for kind in ("weight", "bias"):
        ours[f"embedding.patch.{kind}"] = weights[f"embeddings.patch_embeddings.projection.{kind}"]
        ours[f"norm.{kind}"] = weights[f"layernorm.{kind}"]
        for i in range(depth):
            here = f"blocks.{i}"
            there = next(p for p in STACKS if f"{p}{i}.norm1.weight" in weights) + str(i)
            qkv = [weights[f"{there}.attention.{n}_proj.{kind}"] for n in "qkv"]
            ours[f"{here}.attention.qkv.{kind}"] = torch.cat(qkv)
            plain = f"{there}.mlp.fc1.weight" in weights
            if not plain:
                gated = [weights[f"{there}.mlp.{n}_proj.{kind}"] for n in ("gate", "up")]
                ours[f"{here}.mlp.up.{kind}"] = torch.cat(gated)
            for mine, other in {**INNER, **(GELU if plain else SWIGLU)}.items():
                ours[f"{here}.{mine}.{kind}"] = weights[f"{there}.{other}.{kind}"]
            ours[f"{here}.scale_attention"] = weights[f"{there}.layer_scale1.lambda1"]
            ours[f"{here}.scale_mlp"] = weights[f"{there}.layer_scale2.lambda1"]
    return ours


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_tokens_equal_those_of_transformers(mlp, batch_first):
    torch.manual_seed(0)
    spec = replace(SPEC, mlp=mlp)
    peer, ours = theirs(spec), build(spec, torch.float32, batch_first=batch_first)
    missing, unexpected = ours.load_state_dict(
        translated(peer.state_dict(), spec.depth), strict=False
    )
    assert sorted(missing) == ["head.bias", "head.weight"]
    assert not unexpected
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        found = ours.norm(ours.blocks(ours.embedding(images)))
        found = found if batch_first else found.transpose(0, 1)
        torch.testing.assert_close(found, peer(images).last_hidden_state, rtol=0, atol=1e-5)


def test_layer_scale_begins_as_asked():
    scales = [v for n, v in build(SPEC).named_parameters() if ".scale_" in n]
    assert len(scales) == 2 * SPEC.depth
    assert all(torch.allclose(scale, torch.tensor(1e-5).to(scale)) for scale in scales)


@pytest.mark.parametrize("name", ["recompute_blocks", "recompute_selected"])
def test_recomputation_changes_nothing(name):
    spec = replace(SPEC, mlp="swiglu", layer_scale=0.5)
    assert_equal_step(choice("memory", name).apply, spec=spec)
