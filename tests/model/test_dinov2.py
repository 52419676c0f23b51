"""Registers, SwiGLU, LayerScale and rotary positions as transformers has them in DINOv2 and DINOv3."""

import pytest
import torch

from tests.cells import entry
from tests.choices import choice
from tests.shapes import CASES, NANO, assert_equal_step, build, replace
from vitsweep.model.attention import RotaryPosition
from vitsweep.model.flops import num_parameters

transformers = pytest.importorskip("transformers", reason="pip install transformers")

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
        found = ours.norm(ours.transform(ours.embedding(images), ours.blocks))
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


def dinov3(**settings):
    config = transformers.DINOv3ViTConfig(
        hidden_size=SPEC.width, num_hidden_layers=SPEC.depth, num_attention_heads=SPEC.num_heads,
        intermediate_size=SPEC.mlp_width, image_size=12, patch_size=SPEC.patch_px,
        num_register_tokens=SPEC.registers, layer_norm_eps=SPEC.norm_eps, **settings,
    )  # fmt: skip
    return transformers.DINOv3ViTModel(config).eval()


def of_dinov3(weights, depth):
    """The weights of transformers' DINOv3 under our names; its keys have no bias."""
    ours = {
        "embedding.class_token": weights["embeddings.cls_token"][0, 0],
        "embedding.registers": weights["embeddings.register_tokens"][0],
    }
    for kind in ("weight", "bias"):
        ours[f"embedding.patch.{kind}"] = weights[f"embeddings.patch_embeddings.{kind}"]
        ours[f"norm.{kind}"] = weights[f"norm.{kind}"]
    for i in range(depth):
        here, there = f"blocks.{i}", next(p for p in STACKS if f"{p}{i}.norm1.weight" in weights)
        there += str(i)
        of = {n: f"{there}.attention.{n}_proj" for n in "qkv"}
        ours[f"{here}.attention.qkv.weight"] = torch.cat(
            [weights[f"{of[n]}.weight"] for n in "qkv"]
        )
        ours[f"{here}.attention.query_value.bias"] = torch.cat(
            [weights[f"{of[n]}.bias"] for n in "qv"]
        )
        gated = f"{there}.mlp.gate_proj.weight" in weights
        for kind in ("weight", "bias"):
            up = ("gate_proj", "up_proj") if gated else ("up_proj",)
            ours[f"{here}.mlp.up.{kind}"] = torch.cat(
                [weights[f"{there}.mlp.{n}.{kind}"] for n in up]
            )
            ours[f"{here}.mlp.down.{kind}"] = weights[f"{there}.mlp.down_proj.{kind}"]
            for mine, other in INNER.items():
                ours[f"{here}.{mine}.{kind}"] = weights[f"{there}.{other}.{kind}"]
        for mine, other in (("attention", 1), ("mlp", 2)):
            ours[f"{here}.scale_{mine}"] = weights[f"{there}.layer_scale{other}.lambda1"]
    return ours


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dinov3_is_that_of_transformers_and_has_as_many_parameters(mlp, batch_first):
    torch.manual_seed(0)
    gated = {"use_gated_mlp": True, "hidden_act": "silu"} if mlp == "swiglu" else {}
    peer = dinov3(**gated).double()
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    spec = replace(SPEC, position="rotary", mlp=mlp)
    ours = build(spec, batch_first=batch_first)
    weights = peer.state_dict()
    assert not any("k_proj.bias" in name for name in weights)
    assert num_parameters(spec, 8, "token") == 7 * (spec.width + 1) + sum(
        p.numel() for n, p in peer.named_parameters() if "mask_token" not in n
    )
    missing, unexpected = ours.load_state_dict(of_dinov3(weights, spec.depth), strict=False)
    assert sorted(missing) == ["head.bias", "head.weight"]
    assert not unexpected
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        found = ours.norm(ours.transform(ours.embedding(images), ours.blocks))
        found = found if batch_first else found.transpose(0, 1)
        # Their angles are float32.
        torch.testing.assert_close(found, peer(images).last_hidden_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", [0, 3])
def test_rotary_positions_are_those_of_dinov3(first):
    from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

    torch.manual_seed(0)
    cos, sin = dinov3().rope_embeddings(torch.zeros(1, 3, 12, 12))
    q, k = torch.randn(2, 2, SPEC.num_heads, first + 36, SPEC.width // SPEC.num_heads)
    turn = RotaryPosition(6, SPEC.width // SPEC.num_heads, first)
    for found, wanted in zip((turn(q), turn(k)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kwargs", CASES.values(), ids=CASES)
def test_rotary_positions_are_the_same_in_every_layout_and_attention(kwargs):
    spec = replace(SPEC, position="rotary", layer_scale=0.5)
    assert_equal_step(choice("attention", "sdpa_math").apply, spec=spec, **kwargs)
    plain, second = (build(spec, batch_first=first) for first in (True, False))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(images), second(images), rtol=1e-12, atol=1e-12)
    shifted = torch.roll(images, 2, dims=2)
    assert not torch.allclose(plain(images), plain(shifted))


REFUSED = {
    (
        "sequence_parallel=ulysses",
    ): "use `sequence_parallel=megatron_sp`, or `model.position=learned`",
    ("tokens=drop",): "on one whole grid, not with `tokens=drop`: use `tokens=all`",
    ("attention=mha_module",): "use `attention=sdpa_math`",
    ("model.num_heads=64",): "needs a head width divisible by 4, not 2",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_cannot_turn_patches_is_refused(overrides):
    reasons = entry("model.position=rotary", *overrides).reasons
    assert any(REFUSED[overrides] in reason for reason in reasons), reasons
