"""The bytes of the trace are those that real ranks send, by collective and purpose, on every rank."""

from pathlib import Path

import pytest
import torch

from tests.ranks import on_ranks, placed
from tests.techniques.sequence_parallel.cases import VIDEO, cell
from tests.techniques.sequence_parallel.test_exact import DECAY, ZIGZAG
from tests.techniques.sequence_parallel.test_volume import CASES
from vitsweep.extras.predict.trace import trace_rank
from vitsweep.measure.communication import counted_bytes
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

Sent = dict[str, dict[str, float]]

SHARDINGS = [
    *((f"sharding={name}", "precision=fp32") for name in ("ddp", "zero1", "zero2", "fsdp")),
    ("sharding=fsdp", "precision=O2"),
    (
        "sharding=ddp",
        "precision=O2",
        "batch.accumulation_steps=2",
        "optimizer.clip_norm=1",
        "batch.images_per_step=16",
    ),
    ("sharding=zero1", "precision=bf16_params", "optimizer=adamw_foreach"),
    ("sharding=fsdp", "precision=O1", "precision.half_dtype=float16", "memory=recompute_blocks"),
    ("sharding=ddp", "precision=fp32", "optimizer=adamw_contiguous", "model.width=36"),
    ("sharding=fsdp", "precision=fp32", "model.width=36", "optimizer.clip_norm=1"),
]
SIXTEEN = "batch.images_per_step=16"
HYBRIDS = [
    ("sharding=hsdp", "precision=O2"),
    ("sharding=hsdp", "precision=fp32", "optimizer.clip_norm=1"),
    ("sharding=fsdp", "sequence_parallel=ulysses", "mesh.ulysses=2"),
    ("sharding=fsdp", "sequence_parallel=ring", "mesh.ring=2", *ZIGZAG),
    ("sharding=ddp", "sequence_parallel=usp", "mesh.ulysses=2", "mesh.ring=2"),
    ("sharding=ddp", "sequence_parallel=dsp", "mesh.sequence=2", *VIDEO),
    ("sharding=fsdp", "tensor_parallel=megatron", "mesh.tensor=2", "optimizer.clip_norm=1"),
    ("sharding=ddp", "sequence_parallel=lasp", "mesh.sequence=2", *DECAY),
    ("sharding=zero2", "sequence_parallel=lss", "mesh.sequence=2"),
    ("sharding=ddp", "pipeline_parallel=gpipe", "mesh.pipeline=2", "optimizer.clip_norm=1", SIXTEEN),
    ("sharding=fsdp", "pipeline_parallel=one_f_one_b", "mesh.pipeline=2", "model.depth=4",
     "pipeline_parallel.microbatches=4", SIXTEEN),
    ("sharding=ddp", "sequence_parallel=megatron_sp", "mesh.tensor=2", "precision=O1"),
]  # fmt: skip
FEW = [
    SHARDINGS[1],
    SHARDINGS[4],
    SHARDINGS[5],
    CASES[0],
    CASES[3],
    CASES[10],
    CASES[16],
    CASES[-4],
]


def sent(world: World, cells: list[CellSpec]) -> list[Sent]:
    return [_sent(placed(world, each), each) for each in cells]


def _sent(world: World, each: CellSpec) -> Sent:
    torch.manual_seed(0)
    trainer = parallelize(build_model(each), each, world)
    share = my_share(each, global_batch(each, 0, world), world)
    for _ in range(2):  # pipelines exchange shapes before the first step, DDP its buckets after it
        trainer.step(iter(share))
    with counted_bytes() as sent:
        trainer.step(iter(share))
    return {key: value for key, value in sent.by_collective.items() if value["bytes"]}


def predicted(each: CellSpec, rank: int) -> Sent:
    totals: Sent = {}
    for total in trace_rank(each, rank).collectives:
        entry = totals.setdefault(f"{total.name}/{total.purpose}", {"calls": 0, "bytes": 0.0})
        entry["calls"] += total.count
        entry["bytes"] += total.bytes_sent
    return {key: value for key, value in totals.items() if value["bytes"]}


def differences(ranks: int, choices: list[tuple[str, ...]], folder: Path) -> list[str]:
    more = ("model.num_heads=8", "model.width=64") if ranks == 8 else ()
    cells = [cell(ranks, *chosen, *more) for chosen in choices]
    of_ranks = on_ranks(ranks, sent, cells[0], cells, folder=folder)
    return [
        f"{' '.join(chosen)} rank {rank}: predicted {found}, sent {of_ranks[rank][i]}"
        for i, (chosen, each) in enumerate(zip(choices, cells, strict=True))
        for rank in (range(ranks) if ranks < 8 else (0, 3, 7))
        if not same(found := predicted(each, rank), of_ranks[rank][i])
    ]


def same(a: Sent, b: Sent) -> bool:
    """Equal to the last byte, but for the rounding of (n - 1) / n."""
    return a.keys() == b.keys() and all(a[key] == pytest.approx(b[key], rel=1e-12) for key in a)


@pytest.mark.slow
def test_two_ranks_send_what_was_predicted(tmp_path: Path) -> None:
    assert differences(2, FEW, tmp_path) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_send_what_was_predicted(ranks: int, tmp_path: Path) -> None:
    hybrids = HYBRIDS if ranks > 2 else []
    assert differences(ranks, [*SHARDINGS, *CASES, *hybrids], tmp_path) == []
