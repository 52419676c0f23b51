"""Closed formulas of a step equal its trace."""

from functools import cache

import pytest

from analysis.closed_trace import closed_trace
from tests.techniques.sequence_parallel import formulas
from vitsweep.composition.composer import Composer
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.planning.closed_memory import Sizes
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine

SMALL = (
    "model=vit_small model.depth=4 data=synthetic batch.images_per_step=64 optimizer=adamw_fused"
)
NODE = Machine(
    device="cuda", cores_per_node=64, devices_per_node=8, described_by="a node of 8 GPUs"
)


@cache
def cell_of(overrides: str) -> CellSpec:
    cell = plan_cell(Composer().compose(f"{SMALL} {overrides}".split()), NODE)
    assert not cell.reasons
    return cell.spec


def closed(cell: CellSpec) -> StepTrace:
    return closed_trace(Sizes.of(cell))


PLAIN = "sharding=ddp precision=bf16"
LAYOUTS = (
    PLAIN,
    "sharding=fsdp precision=O3 memory=recompute_blocks",
    pytest.param("sharding=fsdp precision=bf16", marks=pytest.mark.full),
    pytest.param("sharding=hsdp mesh.shard=4 precision=bf16", marks=pytest.mark.full),
    pytest.param("sharding=ddp precision=fp32 memory=recompute_selected", marks=pytest.mark.full),
    pytest.param(
        "sharding=fsdp precision=bf16 tensor_parallel=megatron mesh.tensor=2",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "sharding=fsdp precision=bf16 sequence_parallel=ulysses mesh.ulysses=2 classifier=pooled",
        marks=pytest.mark.full,
    ),
    pytest.param("sharding=fsdp precision=bf16 batch.accumulation_steps=2", marks=pytest.mark.full),
)


@pytest.mark.parametrize("overrides", LAYOUTS)
def test_formulas_equal_the_trace_of_the_same_cell(overrides: str) -> None:
    from vitsweep.extras.predict.trace import trace_cell

    cell = cell_of(overrides)
    formula, trace = closed(cell), trace_cell(cell)
    assert formula.flops_per_step == trace.flops_per_step
    assert formula.parameters == trace.parameters
    assert sent(formula, "parameter") == pytest.approx(sent(trace, "parameter"), rel=0.01)
    assert sent(formula, "gradient") == pytest.approx(sent(trace, "gradient"), rel=0.06)
    for part in ("parameters", "gradients", "optimizer"):
        mine, traced = getattr(formula.memory, part), getattr(trace.memory, part)
        assert mine == pytest.approx(traced, rel=0.01)
    assert formula.memory.peak == pytest.approx(trace.memory.peak, rel=0.2)
    assert moved(formula) == pytest.approx(moved(trace), rel=0.35)
    mine, traced = (sum(t.dispatches.values()) for t in (formula, trace))
    assert mine == pytest.approx(traced, rel=0.2)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        "sharding=ddp mesh.pipeline=2 pipeline_parallel.microbatches=8",
        "sharding=fsdp mesh.pipeline=4 pipeline_parallel.microbatches=4 memory=recompute_selected",
        "sharding=hsdp mesh.shard=2 mesh.pipeline=2 pipeline_parallel.microbatches=4 "
        "sequence_parallel=ulysses mesh.ulysses=2 classifier=pooled resources.nodes=2",
    ],
)
def test_memory_of_a_stage_is_not_underestimated(overrides: str) -> None:
    from vitsweep.extras.predict.trace import trace_cell

    cell = cell_of(
        f"precision=bf16 pipeline_parallel=one_f_one_b batch.images_per_step=256 {overrides}"
    )
    formula, trace = closed(cell).memory, trace_cell(cell).memory
    assert 0.92 * trace.peak < formula.peak < 1.25 * trace.peak


def sent(trace: StepTrace, purpose: str) -> float:
    return sum(c.bytes_sent for c in trace.collectives if c.purpose == purpose)


def moved(trace: StepTrace) -> int:
    return sum(o.bytes_moved for o in trace.operators if o.kind in ("memory", "optimizer"))


@pytest.mark.parametrize("recompute", ["keep_all", "recompute_blocks"])
@pytest.mark.parametrize("precision", ["bf16", "O3"])
def test_activations_sent_equal_the_formula_of_each_technique(
    recompute: str, precision: str
) -> None:
    for overrides in (
        "tensor_parallel=megatron mesh.tensor=2",
        "sequence_parallel=ulysses mesh.ulysses=2 classifier=pooled",
    ):
        cell = cell_of(f"{overrides} memory={recompute} precision={precision}")
        exact = formulas.sent(cell)["activation"]
        assert sent(closed(cell), "activation") == pytest.approx(exact, rel=1e-3)
