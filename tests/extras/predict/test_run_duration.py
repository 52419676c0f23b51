"""How long a run takes: trainings are counted with their evaluations, or named where that is unknown."""

from dataclasses import replace

import pytest

from tests.cells import TINY, cell
from tests.extras.predict.traces import trace_of
from vitsweep.extras.predict.prediction import CPU_SETUP_SECONDS, SPAWN_SECONDS, CellPrediction
from vitsweep.extras.predict.step_time import PARTS, StepTimePrediction
from vitsweep.planning.blocks import INSTRUMENTED_STEPS, run_seconds, training_seconds
from vitsweep.spec.cell_spec import CellSpec

TRAIN = ("task=train", "data=digits", "task.epochs=10", "resources.ranks_per_node=1")
STEP_MS = 100.0
STEPS = 10 * (1198 // 16)
"""Of ten epochs of the 1,198 digits, 16 images each; what does not fill a step is dropped."""
EVALUATION = 599 / 16 / 3
"""Of the 599 held-out digits in training steps: a forward pass takes a third."""


def prediction(spec: CellSpec) -> CellPrediction:
    step = StepTimePrediction(
        step_time_ms=STEP_MS, low_ms=80, high_ms=125, parts_ms=dict.fromkeys(PARTS, 0.0), regime="",
        rates="",
    )  # fmt: skip
    return CellPrediction(
        cell=spec, trace=trace_of(), step_time=step, limit_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(("every", "evaluations"), [(1, 10), (4, 3), (0, 1)])
def test_a_training_takes_its_epochs_and_its_evaluations(every: int, evaluations: int) -> None:
    spec = cell(*TRAIN, f"task.evaluate_every_epochs={every}")
    steps = STEPS + evaluations * EVALUATION
    assert training_seconds(spec, STEP_MS) == pytest.approx(steps * 0.1)
    measured = run_seconds(cell("data=digits", "resources.ranks_per_node=1"), STEP_MS)
    assert run_seconds(spec, STEP_MS) == pytest.approx(measured + steps * 0.1)


def test_hours_of_a_plan_hold_the_training() -> None:
    columns = prediction(cell(*TRAIN)).columns(runs=5)
    assert columns["device_hours"] > 5 * STEPS * STEP_MS / 1e3 / 3600


def test_a_training_of_unknown_length_has_no_hours() -> None:
    spec = cell("task=train", "data=module", *TINY)
    assert spec.data.split_sizes() is None
    found = prediction(spec)
    assert found.run_device_hours is None
    columns = found.columns(runs=5)
    assert all(columns[name] is None for name in ("hours", "device_hours"))
    assert columns["step_time_ms"] == STEP_MS


def test_a_run_whose_steps_are_slow_ends_by_its_limit_of_time() -> None:
    spec = cell(
        "resources.ranks_per_node=1", "measurement.max_seconds=5", "measurement.phase_steps=0"
    )
    warm_up_and_window = (run_seconds(spec, 4000.0, 0.0) or 0.0) - 4 * INSTRUMENTED_STEPS
    assert warm_up_and_window == 5 + 8, "and two steps of the window at least"


def test_the_interval_holds_that_the_set_up_is_assumed() -> None:
    short = prediction(cell("measurement=smoke", "resources.ranks_per_node=1"))
    expected, low, high = short.run_device_hours or (0.0, 0.0, 0.0)
    assert low * 3600 < expected * 3600 - CPU_SETUP_SECONDS[0] / 2
    assert high > 1.5 * expected


def test_ranks_that_import_for_themselves_take_longer() -> None:
    spec = cell("resources.ranks_per_node=4")
    spec = replace(spec, resources=replace(spec.resources, cores_per_node=2))
    own = replace(spec, measurement=replace(spec.measurement, start="spawned"))
    hours = zip(prediction(spec).run_device_hours, prediction(own).run_device_hours, strict=True)  # type: ignore[arg-type]
    assert [3600 / 4 * (b - a) for a, b in hours] == pytest.approx([2 * s for s in SPAWN_SECONDS])


def test_a_run_on_one_gpu_is_predicted_as_long_as_those_of_an_h200_were() -> None:
    """85 runs of 17 cells took 8 min 51 s from line to line; their steps took 61 to 272 ms."""
    for choices in (("resources.device=cuda",), ("resources.device=cuda", "resources.nodes=2")):
        spec = cell("measurement=standard", "resources.ranks_per_node=1", *choices)
        expected, low, high = prediction(spec).run_device_hours or (0.0, 0.0, 0.0)
        is_near = 0.7 < expected * 3600 / (531 / 85) < 1.3
        assert is_near is (len(choices) == 1)
        assert low < 531 / 85 / 3600 < high or len(choices) == 2
