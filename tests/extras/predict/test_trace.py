"""What the trace of a step says about FLOPs, memory and deep models."""

from dataclasses import replace

import pytest

from tests.cells import GPU_NODE, cell
from tests.flops import recomputed_score_flops
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.extras.predict.trace import (
    distinct_ranks,
    trace_cell,
    trace_rank,
    traceable,
    traced_depths,
)
from vitsweep.model.flops import num_parameters, train_flops
from vitsweep.spec.resources import MeshShape

PLAIN = ("sharding=none", "resources.ranks_per_node=1")
FLOPS = [
    ("model.mlp_width=80",),
    ("precision=O1", "batch.accumulation_steps=2"),
    ("attention=sdpa_causal", "classifier=pooled"),
    ("memory=recompute_selected", "layout=batch_second"),
    ("attention=sdpa_math", "optimizer=adamw_contiguous"),
    ("model=axial_vit_nano", "batch.resolution_px=9", "model.depth=6"),
]
"""Choices whose FLOPs have a formula."""


@pytest.mark.parametrize("choices", FLOPS, ids=" ".join)
def test_flops_and_parameters_equal_the_formula(choices: tuple[str, ...]) -> None:
    each = cell(*PLAIN, *choices)
    found = trace_cell(each)
    pooling = each.classifier.pooling
    shape = (each.model, each.batch.resolution_px, pooling, each.attention.attention_pattern)
    again = recomputed_score_flops(*shape) if each.attention.recomputes_scores else 0
    assert found.flops_per_step == each.images_per_step * (train_flops(*shape) + again)
    assert found.parameters == num_parameters(each.model, each.batch.resolution_px, pooling)


def test_a_collective_has_the_format_of_what_it_sums() -> None:
    """The casts of O2 leave gradients of matrices in half precision, and those of norms in float32."""
    found = trace_cell(cell("sharding=ddp", "precision=O2", "resources.ranks_per_node=2"))
    assert {c.dtype for c in found.collectives if c.purpose == "gradient"} == {
        "bfloat16",
        "float32",
    }
    [plain] = {c.dtype for c in trace_cell(cell("sharding=ddp", "precision=O1")).collectives}
    assert plain == "float32"


DEEP = [
    ("sharding=ddp", "precision=O1", "optimizer=adamw_foreach"),
    ("sharding=ddp", "precision=O2", "optimizer.clip_norm=1", "memory=recompute_blocks"),
    ("sharding=fsdp", "precision=O2", "optimizer=adamw_fused"),
    ("sharding=zero2", "precision=fp32", "batch.accumulation_steps=2"),
    ("sharding=fsdp", "sequence_parallel=ulysses", "mesh.ulysses=2", "resources.ranks_per_node=4"),
]
LONG = DEEP[3:]
"""Their whole traces take ten seconds and more."""


@pytest.mark.parametrize(
    "choices",
    [pytest.param(c, marks=[pytest.mark.full] if c in LONG else []) for c in DEEP],
    ids=" ".join,
)
def test_a_deep_model_is_that_of_two_shallow_ones(choices: tuple[str, ...]) -> None:
    wide = ("model.width=128", "model.mlp_width=512", "data=synthetic", "batch.resolution_px=32")
    each = cell("resources.ranks_per_node=2", *choices, *wide, "model.depth=9")
    assert traced_depths(each) == (3, 5)
    short, whole = trace_cell(each), trace_rank(each, 0)
    assert short.flops_per_step == whole.flops_per_step
    assert short.parameters == whole.parameters
    assert _sent(short) == pytest.approx(_sent(whole), rel=1e-12)
    assert short.dispatches == whole.dispatches
    for part in ("parameters", "gradients", "optimizer", "buffers"):
        assert getattr(short.memory, part) == getattr(whole.memory, part), part
    assert short.memory.peak == pytest.approx(whole.memory.peak, rel=0.01)
    counts = [sum(o.count for o in trace.operators) for trace in (short, whole)]
    moved = [sum(o.bytes_moved for o in trace.operators) for trace in (short, whole)]
    assert counts[0] == counts[1]
    assert moved[0] == moved[1]


def _sent(trace: StepTrace) -> dict[str, float]:
    sent: dict[str, float] = {}
    for c in trace.collectives:
        kind = f"{c.name} {c.purpose} {c.group_ranks}"
        sent[kind] = sent.get(kind, 0.0) + c.bytes_sent
    return sent


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("compilation=compile_model", "`compilation=compile_model` "),
        ("attention=flex", "`attention=flex` "),
        ("attention=sdpa_cudnn", ""),
        ("", ""),
    ],
)
def test_choices_that_need_a_device_are_traced_as_others(overrides: str, said: str) -> None:
    spec = cell(*overrides.split(), machine=GPU_NODE)
    traced, notes = traceable(spec)
    assert [said in note for note in notes] == [True] * bool(said)
    assert traceable(traced)[0] == traced
    assert traced.compilation.scope == "nothing"


def test_ranks_that_do_different_work_are_traced() -> None:
    names = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")
    for degrees, ranks in (
        ({}, [0]),
        ({"replicate": 8}, [0]),
        ({"pipeline": 2, "replicate": 2}, [0, 2]),
        ({"pipeline": 4, "tensor": 2}, [0, 2, 6]),
        ({"ulysses": 4}, [0, 3]),
        ({"ring": 2, "tensor": 2}, [0, 3]),
        ({"pipeline": 2, "ring": 2}, [0, 1, 2]),
    ):
        mesh = MeshShape(**(dict.fromkeys(names, 1) | degrees))
        assert distinct_ranks(replace(cell(), mesh=mesh)) == ranks
