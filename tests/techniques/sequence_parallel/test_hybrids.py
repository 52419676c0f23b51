"""Pipelines, and several kinds of parallelism on one mesh, equal one process."""

from pathlib import Path

import pytest

from tests.techniques.sequence_parallel.cases import VIDEO, answers, cell
from tests.techniques.sequence_parallel.equal import training_differences

DEEP = ("model.depth=8", "pipeline_parallel.microbatches=4")
PIPELINES = [
    ("pipeline_parallel=gpipe", *DEEP),
    ("pipeline_parallel=one_f_one_b", *DEEP, "sharding=fsdp"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "sharding=zero1", "memory=recompute_blocks"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "optimizer.clip_norm=0.5", "layout=batch_second"),
    ("pipeline_parallel=gpipe", *VIDEO, *DEEP),
]
ON_FOUR = [
    ("sequence_parallel=dsp", *VIDEO, "mesh.sequence=2", "sharding=fsdp"),
    ("sequence_parallel=dsp", *VIDEO, "mesh.sequence=2", "sharding=hsdp"),
    ("sequence_parallel=ulysses", "mesh.ulysses=2", "sharding=zero1"),
    ("sequence_parallel=ring", "mesh.ring=2", "sharding=zero2"),
    ("tensor_parallel=megatron", "sequence_parallel=ulysses", "mesh.tensor=2", "sharding=fsdp"),
    ("tensor_parallel=megatron", "sequence_parallel=dsp", *VIDEO, "mesh.tensor=2",
     "optimizer.clip_norm=0.5"),
    ("sequence_parallel=megatron_sp", "mesh.tensor=2", "sharding=fsdp", "optimizer.clip_norm=0.5"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "sequence_parallel=dsp", *VIDEO, "mesh.pipeline=2",
     "sharding=fsdp"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "mesh.pipeline=2", "optimizer.clip_norm=0.5"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "tensor_parallel=megatron", "mesh.pipeline=2",
     "optimizer.clip_norm=0.5"),
]  # fmt: skip
ON_EIGHT = [
    ("tensor_parallel=megatron", "sequence_parallel=usp", "mesh.tensor=2", "mesh.ulysses=2",
     "mesh.ring=2"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "sequence_parallel=ulysses", "mesh.pipeline=2",
     "mesh.ulysses=2", "sharding=ddp", "pipeline_parallel.microbatches=2"),
    ("sequence_parallel=dsp", *VIDEO, "mesh.sequence=2", "mesh.shard=2", "sharding=hsdp"),
    ("tensor_parallel=megatron", "sequence_parallel=usp", "mesh.tensor=2", "mesh.ulysses=2",
     "mesh.ring=2", "attention=sdpa_causal", "classifier=pooled", "sequence_parallel.order=zigzag",
     "memory=recompute_blocks", "sharding=fsdp", "batch.resolution_px=10"),
    ("pipeline_parallel=one_f_one_b", *DEEP, "sequence_parallel=dsp", *VIDEO, "model.depth=8",
     "mesh.pipeline=2", "mesh.sequence=2", "sharding=fsdp", "mesh.shard=2",
     "pipeline_parallel.microbatches=2", "memory=recompute_blocks"),
    ("pipeline_parallel=gpipe", *DEEP, "tensor_parallel=megatron", "sequence_parallel=ring",
     "mesh.pipeline=2", "mesh.tensor=2", "mesh.ring=2", "optimizer.clip_norm=0.5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, PIPELINES, marks=pytest.mark.full),
        pytest.param(4, [*PIPELINES, *ON_FOUR], marks=pytest.mark.slow),
        pytest.param(8, ON_EIGHT, marks=pytest.mark.full),
    ],
)
def test_training_equals_one_process(
    ranks: int, cases: list[tuple[str, ...]], tmp_path: Path
) -> None:
    cells = [cell(ranks, *case) for case in cases]
    for name, apart in answers(training_differences, cells, tmp_path):
        assert apart["loss"] < 1e-10, (name, apart)
        assert apart["weights"] < 1e-9, (name, apart)
        assert apart["moved"] > 1e-3, (name, apart)
