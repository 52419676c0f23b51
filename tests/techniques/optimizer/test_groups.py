import pytest
import torch
from torch import nn

from vitsweep.model.vit import ViT
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.training.update import parameter_groups

NANO = ViTSpec(
    name="nano",
    depth=2,
    width=32,
    num_heads=2,
    mlp_width=64,
    mlp="gelu",
    layer_scale=None,
    patch_px=2,
    in_channels=1,
    num_classes=10,
    head="classify",
    norm_eps=1e-6,
    registers=0,
    position="learned",
)


@pytest.fixture
def vit() -> nn.Module:
    return ViT(NANO, resolution_px=8, pooling="token")


def names(model: nn.Module, group: dict) -> set[str]:
    chosen = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def test_norms_biases_position_and_class_token_do_not_decay(vit):
    decayed, kept = parameter_groups(vit, 0.1)

    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    undecayed = names(vit, kept)
    assert {"embedding.position", "embedding.class_token", "head.bias"} <= undecayed
    assert all("norm" in n or n.endswith("bias") for n in undecayed if "embedding" not in n)
    assert not any("norm" in n or n.endswith("bias") for n in names(vit, decayed))
    assert {"embedding.patch.weight", "head.weight"} <= names(vit, decayed)


def test_every_trainable_parameter_is_in_exactly_one_group(vit):
    vit.head.bias.requires_grad_(False)
    grouped = [p for group in parameter_groups(vit, 0.1) for p in group["params"]]

    assert len(grouped) == len({id(p) for p in grouped}) == len(list(vit.parameters())) - 1


def test_packed_attention_projections_decay_and_empty_groups_vanish():
    decayed, kept = parameter_groups(nn.MultiheadAttention(8, 2), 0.1)

    assert [tuple(p.shape) for p in decayed["params"]] == [(24, 8), (8, 8)]
    assert len(kept["params"]) == 2
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_weight_decay_shrinks_matrices_only(vit):
    before = {name: p.detach().clone() for name, p in vit.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(vit, 0.5), lr=0.1)
    for p in vit.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

    changed = {n for n, p in vit.named_parameters() if not torch.equal(p, before[n])}
    expected = names(vit, parameter_groups(vit, 0.5)[0])
    assert changed == {n for n in expected if before[n].any()}  # a zero head stays zero
