"""What the counters see is what the formulas say, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.techniques.sequence_parallel import formulas
from tests.techniques.sequence_parallel.cases import AXIAL, VIDEO, answers, cell
from tests.techniques.sequence_parallel.test_exact import DECAY, ZIGZAG
from vitsweep.measure.communication import counted_bytes
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

SINGLE = ("precision.dtype=float32",)
EIGHT_PARTS = ("pipeline_parallel.microbatches=8",)
"""As many as the most ranks of these tests."""

CASES = [
    ("sequence_parallel=ulysses",),
    ("sequence_parallel=ulysses", *VIDEO, "memory=recompute_blocks"),
    ("sequence_parallel=ring",),
    ("sequence_parallel=ring", *ZIGZAG, "memory=recompute_selected"),
    ("sequence_parallel=ring", *AXIAL, *SINGLE),
    ("sequence_parallel=usp", *VIDEO),
    ("sequence_parallel=usp", *ZIGZAG, "batch.accumulation_steps=2"),
    ("sequence_parallel=dsp", *VIDEO),
    ("sequence_parallel=dsp", *AXIAL, "memory=recompute_blocks"),
    ("sequence_parallel=lasp", *DECAY),
    ("sequence_parallel=lasp2", "attention=linear", "memory=recompute_selected"),
    ("sequence_parallel=lasp2", "attention=linear", *AXIAL),
    ("sequence_parallel=lss",),
    ("sequence_parallel=lss", *VIDEO, "memory=recompute_blocks"),
    ("sequence_parallel=lss", "precision=O1"),
    ("pipeline_parallel=gpipe", "model.depth=8", *VIDEO[:3]),
    ("pipeline_parallel=one_f_one_b", "model.depth=9", *EIGHT_PARTS, "memory=recompute_blocks"),
    ("tensor_parallel=megatron",),
    ("tensor_parallel=megatron", *VIDEO, "memory=recompute_blocks"),
    ("sequence_parallel=ulysses", "precision=O1"),
    ("sequence_parallel=ring", "precision=O1", "memory=recompute_blocks"),
    ("sequence_parallel=dsp", "precision=O2", *VIDEO),
    ("sequence_parallel=lasp2", "attention=linear", "precision=bf16"),
    ("tensor_parallel=megatron", "precision=O1"),
    ("pipeline_parallel=one_f_one_b", "model.depth=8", *EIGHT_PARTS, "precision=O1"),
    ("sequence_parallel=megatron_sp", "precision=O1"),
    ("sequence_parallel=megatron_sp",),
    ("sequence_parallel=megatron_sp", "precision=O2", "sharding=none"),
    ("sequence_parallel=megatron_sp", "precision=bf16_params", "batch.accumulation_steps=2"),
    ("sequence_parallel=megatron_sp", *VIDEO, "memory=recompute_selected"),
]  # fmt: skip

DIT = ("objective=flow_matching", "model=dit_nano")
STDIT = ("objective=flow_matching", "model=stdit_nano", "data=moving_digits", "data.num_frames=6",
         "model.depth=4")  # fmt: skip
TEXT = (*STDIT, "data=synthetic_latents", "data.num_frames=6", "data.text_vectors=5",
        "data.text_width=8", "batch.resolution_px=16")  # fmt: skip
BLOCKS = "memory=recompute_blocks"
DIFFUSION = [
    *(
        (f"sequence_parallel={method}", *TEXT)
        for method in ("ulysses", "ring", "usp", "dsp", "lss")
    ),
    ("sequence_parallel=ulysses", *DIT, BLOCKS),
    ("sequence_parallel=ring", *DIT, "batch.accumulation_steps=2"),
    ("sequence_parallel=dsp", *STDIT, BLOCKS, "model.depth=3"),
    ("sequence_parallel=dsp", *TEXT, "precision=O1"),
    ("sequence_parallel=megatron_sp", *DIT),
    ("sequence_parallel=megatron_sp", *DIT, BLOCKS),
    ("sequence_parallel=megatron_sp", *STDIT, "precision=O1"),
    ("sequence_parallel=megatron_sp", *TEXT, BLOCKS, "batch.accumulation_steps=2"),
    ("tensor_parallel=megatron", *DIT, BLOCKS),
    ("tensor_parallel=megatron", *TEXT),
    ("tensor_parallel=megatron", *STDIT, BLOCKS),
]
"""Text is whole on every rank, and nothing is sent for it but where matrices are split."""


def counted(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    """Bytes of one step, mean over ranks, by purpose."""
    return [_counted(world, each) for each in cells]


def _counted(world: World, each: CellSpec) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = parallelize(build_model(each), each, world)
    share = my_share(each, global_batch(each, 0, world), world)
    trainer.step(iter(share))  # pipelines exchange shapes before their first step
    with counted_bytes() as counted:
        trainer.step(iter(share))
    sent = {}
    for purpose in ("activation", "gradient"):
        mean = torch.tensor(counted.by_purpose[purpose], dtype=torch.float64)
        dist.all_reduce(mean)
        sent[purpose] = float(mean) / world.size
    messages = counted.by_collective.get("all_reduce/gradient", {"calls": 0})
    return sent | {"gradient messages": float(messages["calls"])}


RANKS = [
    pytest.param(2, marks=pytest.mark.slow),
    pytest.param(4, marks=pytest.mark.full),
    pytest.param(8, marks=pytest.mark.full),
]


@pytest.mark.parametrize("ranks", RANKS)
def test_counters_equal_the_formulas(ranks: int, tmp_path: Path) -> None:
    more = ("model.num_heads=8",) if ranks == 8 else ()
    check([cell(ranks, *case, *more) for case in CASES], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_counters_equal_the_formulas_of_diffusion_transformers(ranks: int, tmp_path: Path) -> None:
    check([cell(ranks, *case) for case in DIFFUSION], tmp_path)


def check(cells: list[CellSpec], folder: Path) -> None:
    wrong = {}
    for each, (name, sent) in zip(
        cells, in_order(cells, answers(counted, cells, folder)), strict=True
    ):
        for purpose, expected in formulas.sent(each).items():
            if sent[purpose] != pytest.approx(expected, rel=1e-12):
                wrong[name, purpose] = (sent[purpose], expected)
        if each.sequence_parallel.name == "megatron_sp" and each.sharding.name == "none":
            assert sent["gradient messages"] == 2  # all norms in float32, all biases in half
    assert not wrong, "\n".join(f"{key}: counted {a}, formula {b}" for key, (a, b) in wrong.items())


def test_switches_of_dsp_send_half_of_ulysses_all_to_alls() -> None:
    """Per pair of a spatial and a temporal block 2 M/N against 4 M/N; DSP saves the last switch."""
    video = ("model=video_vit_nano", "data=moving_digits", "data.num_frames=8", "model.depth=4")
    for ranks in (2, 4):
        dsp, ulysses = (cell(ranks, f"sequence_parallel={m}", *video) for m in ("dsp", "ulysses"))
        at_the_end = formulas.sent(dsp)["activation"] - formulas.switches(dsp)
        pairs = dsp.model.depth // 2
        share = (2 * pairs - 1) / (2 * pairs)
        switched, exchanged = (formulas.sent(c)["activation"] - at_the_end for c in (dsp, ulysses))
        assert switched == pytest.approx(share * exchanged / 2)


def in_order(cells: list[CellSpec], found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`answers` groups cells by their mesh; undo that."""
    meshes = list(dict.fromkeys(each.mesh for each in cells))
    order = sorted(range(len(cells)), key=lambda i: meshes.index(cells[i].mesh))
    return [found[order.index(i)] for i in range(len(cells))]
