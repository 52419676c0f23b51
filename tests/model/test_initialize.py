"""Weights depend on seed and name alone, however a model is split, and no rank builds all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cells import entry
from tests.techniques.sequence_parallel.cases import VIDEO, answers, cell
from tests.training.alone import ONE
from vitsweep.model.build import build_model
from vitsweep.model.initialize import (
    Draws,
    _picked_one_by_one,
    chosen,
    draw_transformer_weight,
    draw_zeros,
    materialize,
    picked_rows,
    plain_name,
)
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import whole_tensors
from vitsweep.world import World


def on_meta(spec: CellSpec) -> Any:
    torch.manual_seed(spec.seed)
    with torch.device("meta"):
        return build_model(spec)


def plain(spec: CellSpec) -> dict[str, Tensor]:
    torch.manual_seed(spec.seed)
    return build_model(spec).state_dict()


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout=batch_second", "layout.channels_last=true"],
        ["model=video_vit_nano", "data=moving_digits"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_model_from_meta_has_the_weights_and_buffers_of_one_built_at_once(
    overrides: list[str],
) -> None:
    spec = entry(*overrides, "model.width=32", *ONE).spec
    model = on_meta(spec)
    materialize(model, torch.device("cpu"))
    assert model.state_dict().keys() == plain(spec).keys()
    for name, value in plain(spec).items():
        assert torch.equal(model.state_dict()[name], value), name


def test_q_k_and_v_are_drawn_each_for_itself_and_unknown_names_are_refused() -> None:
    generator, weight = torch.Generator().manual_seed(0), torch.empty(3 * 384, 384)
    draw_transformer_weight("blocks.0.attention.qkv.weight", weight, generator, layer_scale=1.0)
    assert [float(part.std()) for part in weight.chunk(3)] == pytest.approx([0.051] * 3, rel=0.01)
    with pytest.raises(ValueError, match=r"`blocks\.0\.new\.weight`"):
        draw_transformer_weight(
            "blocks.0.new.weight", torch.empty(2, 2), generator, layer_scale=1.0
        )


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that is not on `meta`."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


def built(world: World, cells: list[CellSpec]) -> list[dict[str, Any]]:
    return [_built(world, each) for each in cells]


def _built(world: World, each: CellSpec) -> dict[str, Any]:
    model = on_meta(each)
    with _Largest() as largest:
        trainer = parallelize(model, each, world)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in trainer.model.parameters())
    found = whole_tensors(trainer, lambda p: p)
    wanted = plain(each)
    apart = [
        n for n, p in wanted.items() if not torch.equal(found[n].reshape(p.shape), p.to(found[n]))
    ]
    largest_weight = max(p.numel() for p in wanted.values())
    return {
        "apart": apart,
        "share": held / sum(p.numel() for p in wanted.values()),
        "one at a time": largest.elements <= largest_weight,
    }


def test_ranks_build_only_their_own_parts(tmp_path: Path) -> None:
    split = [
        ("sharding=fsdp",),
        ("sharding=fsdp", *VIDEO, "mesh.shard=2"),
        ("tensor_parallel=megatron", "sharding=fsdp"),
        ("tensor_parallel=megatron", "sharding=none"),
        ("pipeline_parallel=gpipe", "model.depth=4", "sharding=zero2"),
    ]
    for name, found in answers(built, [cell(2, *case) for case in split], tmp_path):
        assert not found["apart"], name
        assert found["one at a time"], name
        assert 0.4 < found["share"] < 0.7, name


def test_first_values_follow_from_the_name() -> None:
    def spread(name: str, *shape: int) -> tuple[float, float]:
        weight = torch.empty(*shape)
        draw_transformer_weight(name, weight, torch.Generator().manual_seed(0), layer_scale=0.25)
        return round(float(weight.mean()), 2), float(weight.std())

    for name, shape, mean, deviation in (
        ("blocks.0.attention.out.weight", (300, 100), 0, (2 / 400) ** 0.5),
        ("blocks.0.mlp.up.weight", (300, 100), 0, (2 / 400) ** 0.5),
        ("blocks.0.mlp.down.weight", (100, 300), 0, (2 / 400) ** 0.5),
        ("embedding.patch.weight", (1000, 3, 4, 4), 0, 48**-0.5),
        ("embedding.position", (200, 100), 0, 0.02),
        ("embedding.position_x", (200, 100), 0, 0.02),
        ("embedding.class_token", (10_000,), 0, 0.02),
        ("embedding.registers", (100, 100), 0, 0.02),
        ("head.weight", (200, 100), 0, 0.02),
        ("blocks.0.scale_attention", (5,), 0.25, 0),
        ("blocks.0.scale_mlp", (5,), 0.25, 0),
        ("blocks.0.mlp.up.bias", (5,), 0, 0),
        ("norm.bias", (5,), 0, 0),
        ("norm.weight", (5,), 1, 0),
        ("blocks.0.norm_mlp.weight", (5,), 1, 0),
    ):
        found = spread(name, *shape)
        assert found == (mean, pytest.approx(deviation, rel=0.03)), name
    for name, shape in (("blocks.0.norm_mlp.weight", (5, 5)), ("normal.weight", (5, 5))):
        with pytest.raises(ValueError, match=name):
            spread(name, *shape)


def test_names_are_those_before_any_wrapper() -> None:
    for name, plain_one in (
        (
            "module.blocks.0._orig_mod._checkpoint_wrapped_module.mlp.up.bias",
            "blocks.0.mlp.up.bias",
        ),
        ("blocks.0.attention.in_proj_weight", "blocks.0.attention.qkv.weight"),
        ("blocks.0.attention.in_proj_bias", "blocks.0.attention.qkv.bias"),
        ("blocks.0.attention.out_proj.weight", "blocks.0.attention.out.weight"),
        ("blocks.0.attention.out_proj.bias", "blocks.0.attention.out.bias"),
        ("modules.head", "modules.head"),
    ):
        assert plain_name(name) == plain_one


def test_draws_follow_from_seed_replica_step_purpose_and_the_number_of_the_pass() -> None:
    like = torch.zeros(1)

    def drawn(draws: Draws, owner: nn.Module, purpose: str = "drop") -> tuple[float, ...]:
        found = draws.uniform(owner, purpose, (3,), like)
        assert (found.dtype, found.shape) == (torch.float32, (3,))
        return tuple(found.tolist())

    draws, owner, other = Draws(1), nn.Linear(1, 1), nn.Linear(1, 1)
    draws.begin(0)
    first, second = drawn(draws, owner), drawn(draws, owner)
    assert drawn(draws, other) == first, "each owner counts its own passes"
    with torch.no_grad():
        third = drawn(draws, owner)
        assert drawn(draws, owner) == third, "a look for shapes does not count"
    assert drawn(draws, owner) == third
    apart = [first, second, third, drawn(draws, owner, "more")]
    draws.begin(0)
    assert drawn(draws, owner) == first, "the step begins anew"
    draws.begin(1)
    apart.append(drawn(draws, owner))
    for another in (Draws(2), Draws(1, replica=1)):
        apart.append(drawn(another, nn.Linear(1, 1)))
    assert len({*apart}) == 7
    assert drawn(Draws(1), nn.Linear(1, 1)) == first


def test_the_smallest_numbers_are_chosen_and_rows_picked_alike() -> None:
    numbers = torch.tensor([[0.5, 0.1, 0.9, 0.3], [0.2, 0.8, 0.1, 0.4]])
    places = chosen(numbers, 2)
    assert places.tolist() == [[1, 3], [0, 2]]
    x = torch.arange(24.0).reshape(2, 4, 3)
    for pick in (picked_rows, _picked_one_by_one):
        assert pick(x, places)[..., 0].tolist() == [[3, 9], [12, 18]]


def test_trained_tensors_that_are_all_zero_are_drawn_by_seed_and_name() -> None:
    def zeros() -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        model["d"] = model["a"]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("b"))
            parameter.data *= name.startswith("c")
        return model

    first, again, other = (dict(draw_zeros(zeros(), s).named_parameters()) for s in (1, 1, 2))
    assert first["a.weight"].std() > 0.005
    assert torch.equal(first["a.weight"], again["a.weight"])
    assert not torch.equal(first["a.weight"], other["a.weight"])
    assert not first["a.bias"].any(), "one axis"
    assert not first["b.weight"].any(), "not trained"
    assert first["c.weight"].abs().max() > 0.1, "as it was"
