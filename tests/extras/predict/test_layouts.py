"""The search over layouts: closed formulas equal traces, commands compose, what does not fit is left out."""

from functools import cache

import pytest

from tests.techniques.sequence_parallel import formulas
from vitsweep.api.plan import machine_with
from vitsweep.composition.composer import Composer
from vitsweep.errors import BadValueError
from vitsweep.extras.predict.layouts import Found, closed_trace, search_layouts
from vitsweep.extras.predict.search import _assumed, _compose, parser, search
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.planning.closed_memory import Sizes
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import profile_named
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.spec.rules import conflicts

SHAPE = ("model=vit_small", "model.depth=4", "data=synthetic")
SMALL = (*SHAPE, "batch.images_per_step=64", "optimizer=adamw_fused")
NODE = Machine(
    device="cuda", cores_per_node=64, devices_per_node=8, described_by="a node of 8 GPUs"
)


@cache
def cell_of(overrides: str) -> CellSpec:
    cell = plan_cell(Composer().compose([*SMALL, *overrides.split()]), NODE)
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


@cache
def found(images: int = 64) -> Found:
    words = [*SHAPE, f"batch.images_per_step={images}", "resources.nodes=2", "precision=bf16"]
    base, choices = _compose(words, profile_named("h100"))
    return search_layouts(base, choices, profile_named("h100"))


def test_the_search_ranks_what_can_run() -> None:
    result = found()
    speeds = [c.images_per_second for c in result.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert result.considered == result.invalid + result.too_large + len(result.ranked)
    assert {c.cell.mesh.pipeline for c in result.ranked} >= {1, 2, 4}
    assert all(not conflicts(c.cell) for c in result.ranked[:50])
    assert all(c.interval[0] < c.images_per_second < c.interval[1] for c in result.ranked)


def test_every_printed_command_is_the_cell_that_was_ranked() -> None:
    composer, node = Composer(), machine_with(profile_named("h100"))
    for candidate in found().ranked[::40]:
        words = [*SHAPE, "batch.images_per_step=64", "resources.nodes=2", "precision=bf16"]
        typed = plan_cell(composer.compose([*words, *candidate.overrides]), node)
        assert typed.cell_id == candidate.cell.cell_id
        assert not typed.reasons


def test_a_model_that_no_layout_holds_is_refused_with_the_least_memory() -> None:
    with pytest.raises(BadValueError, match=r"smallest needs \d+ GiB per GPU"):
        search(
            [
                "--search",
                "layouts",
                "--hardware",
                "v100_16g",
                "model=vit_10b",
                "batch.images_per_step=8",
            ]
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mesh.tensor=2"], "`mesh.tensor=2` is what `--search layouts` chooses"),
        (["model=resnet_50"], "formulas for plain transformers"),
        (
            ["model=vit_base", "batch.images_per_step=7", "model.depth=1", "model.num_heads=1"],
            "does not split over the ranks of any",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadValueError) as refused:
        search(["--search", "layouts", "--hardware", "h100", *words])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("device", "computes_in"), [("h100", "bfloat16"), ("v100", "float16"), ("mi250x", "bfloat16")]
)
def test_without_a_precision_one_is_taken_that_the_device_has_units_for(
    device: str, computes_in: str
) -> None:
    hardware = profile_named(device)
    base, _ = _compose([*SHAPE, *_assumed(SHAPE, hardware)], hardware)
    assert Sizes.of(base).compute == computes_in
    assert computes_in in hardware.peak_tflops


def test_hardware_must_be_named() -> None:
    with pytest.raises(Exception, match="--hardware"):
        parser().parse_args(["--search", "layouts"])


def test_the_table_names_ten_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert search(["--search", "layouts", "model=vit_base", "--hardware", "a100_80g"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("python -m vitsweep model=vit_base data=synthetic precision=bf16") == 10
    table = shown[: shown.index("1. python")].splitlines()
    assert "80 % range" in table[1]
    assert max(map(len, table)) <= 80
