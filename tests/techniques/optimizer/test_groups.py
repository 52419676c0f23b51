import pytest
import torch
from torch import nn

from vitsweep.model.vit import ViT
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.training import update
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


def test_parts_of_split_matrices_have_groups_of_their_own_and_are_marked(monkeypatch, vit):
    split = {"blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias"}
    monkeypatch.setattr(update, "split_over_ranks", lambda model: split)
    groups = parameter_groups(vit, 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1, 0.0]
    assert [bool(g.get("split_over_tensor")) for g in groups] == [False, False, True, True]
    assert [g["names"] for g in groups[2:]] == [[name] for name in sorted(split, reverse=True)]
    assert all(names(vit, group) == set(group["names"]) for group in groups)
    for group in groups:
        assert group["in_blocks"] == {name for name in group["names"] if "blocks." in name}


def test_blocks_that_a_user_marks_are_the_only_ones(monkeypatch, vit):
    monkeypatch.setattr(update, "is_marked", lambda module: module is vit.blocks[1])
    inside = update.names_in_blocks(vit)
    assert inside == {name for name, _ in vit.named_parameters() if name.startswith("blocks.1.")}


def test_masters_are_copies_of_half_parameters_alone():
    wide = nn.Parameter(torch.ones(2))
    half, unused = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    masters = update.MasterWeights([{"params": [wide, half, unused], "lr": 0.1}])
    [group] = masters.groups
    assert group["lr"] == 0.1
    assert group["params"][0] is masters.of(wide) is wide
    assert [p.dtype for p in group["params"]] == [torch.float32] * 3
    assert masters.of(half) is group["params"][1]
    assert masters.of(unused) is group["params"][2]
    half.grad = torch.full_like(half, 3.0)
    masters.take_gradients()
    assert [None if p.grad is None else p.grad.tolist() for p in group["params"]] == [
        None,
        [3, 3],
        None,
    ]
    masters.of(half).data.fill_(1.25)
    masters.publish()
    assert (half.tolist(), unused.tolist()) == ([1.25] * 2, [1.0] * 2)
    masters.zero_model_gradients()
    assert half.grad is None
