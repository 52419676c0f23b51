"""Weights depend on seed and name alone, however a model is split, and no rank builds all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cells import entry
from tests.techniques.sequence_parallel.cases import VIDEO, answers, cell
from tests.training.alone import ONE
from vitsweep.model.build import build_model
from vitsweep.model.initialize import draw_transformer_weight, materialize
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
    draw_transformer_weight("blocks.0.attention.qkv.weight", weight, generator)
    assert [float(part.std()) for part in weight.chunk(3)] == pytest.approx([0.051] * 3, rel=0.01)
    with pytest.raises(ValueError, match=r"`blocks\.0\.new\.weight`"):
        draw_transformer_weight("blocks.0.new.weight", torch.empty(2, 2), generator)


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
