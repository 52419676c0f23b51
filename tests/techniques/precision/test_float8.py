"""Which linears FP8 converts, and what the record says of it."""

from dataclasses import replace

import pytest
import torch

from tests.cells import GPU_NODE, TINY, entry
from tests.choices import choice
from vitsweep.console import TORCHAO_IMPORT, quiet_loggers
from vitsweep.measure.environment import converted_layers
from vitsweep.model.block import Stack
from vitsweep.proof.twin import twin_of
from vitsweep.spec.resources import HERE
from vitsweep.techniques.precision.float8 import gains

with quiet_loggers(*TORCHAO_IMPORT):
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

SIZES = (16, 24, 768, 1024, 1040, 2048, 2064, 3072, 4096, 4112, 5120)
WIDE = ("model.width=1024", "model.mlp_width=4096", "model.num_heads=16")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_thresholds_are_those_of_torchao(recipe: str) -> None:
    theirs = _auto_filter_for_recipe(recipe, [])
    for outputs in SIZES:
        for inputs in SIZES:
            linear = torch.nn.Linear(inputs, outputs, device="meta")
            assert gains(recipe, outputs, inputs) == theirs(linear, "blocks.0"), (outputs, inputs)


class Blocks(torch.nn.Module):
    """Linears of ViT-B, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            torch.nn.ModuleDict(
                {
                    "qkv": torch.nn.Linear(768, 2304, device="meta"),
                    "out": torch.nn.Linear(768, 768, device="meta"),
                    "up": torch.nn.Linear(768, 3072, device="meta"),
                    "down": torch.nn.Linear(3072, 768, device="meta"),
                }
            )
            for _ in range(2)
        )
        self.blocks = Stack(blocks, norm=torch.nn.Identity(), axes=())
        self.head = torch.nn.Linear(768, 2000, device="meta")


def converted(**settings: object) -> str | None:
    precision = choice("precision", "fp8", emulate=True, **settings)
    return converted_layers(precision.convert(Blocks()))


def test_only_layers_that_gain_are_converted_and_named() -> None:
    assert converted() == "2 x blocks.*.qkv, 2 x blocks.*.up"
    names = (f"2 x blocks.*.{name}" for name in ("qkv", "out", "up", "down"))
    assert converted(layers="all") == ", ".join(names)
    assert converted_layers(Blocks()) is None


def test_the_twin_of_a_cell_converts_its_small_linears() -> None:
    planned = entry(*TINY, *WIDE, "precision=fp8", "batch.images_per_step=1024", machine=GPU_NODE)
    assert planned.spec.precision.layers == "gaining"  # type: ignore[attr-defined]
    assert twin_of(planned.spec).precision.layers == "all"  # type: ignore[attr-defined]


def test_a_model_of_which_nothing_gains_is_refused() -> None:
    fp8 = ("precision=fp8", "batch.images_per_step=1024")
    told = " ".join(entry(*TINY, *fp8, machine=GPU_NODE).reasons)
    assert all(name in told for name in ("`precision.layers=gaining`", "`model.width=32`"))
    assert not entry(*TINY, *WIDE, *fp8, machine=GPU_NODE).reasons
    assert not entry(*TINY, *fp8, "precision.layers=all", machine=GPU_NODE).reasons
    rowwise = " ".join(
        entry(*TINY, *WIDE, *fp8, "precision.recipe=rowwise", machine=GPU_NODE).reasons
    )
    assert "`precision.recipe=rowwise`" in rowwise


GENERATIONS = {(8, 0): "needs a GPU with FP8 units", (8, 9): "", (9, 0): "", (10, 0): ""}


@pytest.mark.parametrize("capability", GENERATIONS)
def test_a_generation_of_gpus_without_fp8_units_is_named(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitsweep.techniques.precision.float8.gpu_capability", lambda: capability)
    here = replace(GPU_NODE, described_by=HERE)
    told, overrides = GENERATIONS[capability], ("precision=fp8", "batch.images_per_step=1024")
    planned = [entry(*TINY, *WIDE, *overrides, machine=m) for m in (here, GPU_NODE)]
    reasons, elsewhere = (" ".join(p.reasons) for p in planned)
    assert told in reasons
    assert bool(told) == ("compute capability" in reasons)
    assert "compute capability" not in elsewhere
