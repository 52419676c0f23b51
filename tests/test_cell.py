"""One cell on one rank, from its spec to the summary of its run."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._tools

from tests.data.cells_and_worlds import world
from tests.ranks import on_ranks
from tests.training.alone import alone
from vitsweep.cell import DivergedError, RunContext, run_cell
from vitsweep.data.digits import Digits
from vitsweep.measure.summarize import Summary
from vitsweep.results.metrics import METRICS
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.training import timed_steps
from vitsweep.training.timed_steps import PHASES
from vitsweep.world import World

EXPLOSIVE = ("optimizer=sgd_loop", "optimizer.learning_rate=1e15")


def short(spec: CellSpec, warmup: int = 1, measured: int = 3, phases: int = 1) -> CellSpec:
    window = replace(
        spec.measurement,
        warmup_steps=warmup,
        measured_steps=measured,
        phase_steps=phases,
        warmup_min_seconds=0.0,
        min_seconds=0.0,
        prove="none",
    )
    return replace(spec, measurement=window)


def run(spec: CellSpec, proved: str = "", folder: Path = Path()) -> Summary:
    context = RunContext(proved=proved, folder=folder)
    return run_cell(spec, world(), context)


def test_a_run_gives_every_number_of_a_measured_cell() -> None:
    found = run(short(alone())).metrics
    elsewhere = {
        "throughput_spread",  # of a cell, over its runs
        "unadjusted_images_per_second",
        "speedup",
        "speedup_low",
        "speedup_high",
        "peak_gib",  # made by the tables
        "bubble_ms",  # pipelines
        "accuracy_top1",  # task=train
        "accuracy_top1_raw",
        "accuracy_top5",
        "held_out_loss",  # of other objectives
        "probe_top1",
        "feature_spread",
        "prototype_information",
        "train_seconds",
        "seconds_to_target",
        "epochs_to_target",
        "first_compile_seconds",
    }
    assert {column for column in METRICS if column not in found} <= elsewhere | {"peak_tflops"}
    assert found["images_per_second"] > 0
    phases = sum(found[f"{p}_ms"] for p in ("data", "forward", "backward", "optimizer"))
    assert phases > 0
    assert found["communication_ms"] == found["gradient_bytes_per_step"] == 0
    assert found["mfu"] is None
    assert found["setup_seconds"] > 0


BURST, SECONDS_PER_BATCH = 4, 0.2


class SlowBatches(Batches):
    """Batches of another, that come in bursts; they alone move a clock, and note when each is asked for."""

    def __init__(self, of: Batches, clock: SimpleNamespace) -> None:
        self.num_train, self.num_test, self.prefetched = of.num_train, of.num_test, 2 * BURST
        self._of, self._clock = of, clock

    def train(self, epoch: int, first: int = 0) -> Iterator[Any]:
        for number, batch in enumerate(self._of.train(epoch, first)):
            self._clock.requests.append(self._clock.now)
            of_burst = SECONDS_PER_BATCH * (BURST - 1) * (number % BURST == 0)
            self._clock.now += SECONDS_PER_BATCH / BURST + of_burst
            yield batch

    def test(self) -> Iterator[Any]:
        return self._of.test()


def test_throughput_is_images_over_the_time_of_a_window_that_waits_for_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, opened = SimpleNamespace(now=0.0, requests=[]), Digits.open
    here = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(timed_steps, "time", here)
    slow = lambda *of: SlowBatches(opened(*of), clock)  # noqa: E731
    monkeypatch.setattr(Digits, "open", slow)
    spec = short(alone(), measured=16)
    found = run(replace(spec, measurement=replace(spec.measurement, min_seconds=2.0)))
    first, steps = found.samples["warm_up_steps"], len(found.samples["step_time_ms"][0])
    wall = clock.requests[steps] - clock.requests[first]
    assert first >= 2 * BURST, "what the loader holds ready is used up before"
    assert found.metrics["window_seconds"] == pytest.approx(wall)
    assert wall >= 2
    assert found.validity["steps_counted"] == steps - first == 16
    rate = spec.batch.images_per_step / SECONDS_PER_BATCH
    assert found.metrics["images_per_second"] == pytest.approx(rate)
    assert found.validity["uneven_steps"] is True
    assert found.validity["uneven_steps_cause"] == "data"
    assert median(found.samples["step_time_ms"][0][first:]) < 0.5e3 * SECONDS_PER_BATCH


def test_without_phase_steps_there_are_no_phases() -> None:
    assert "forward_ms" not in run(short(alone(), phases=0)).metrics


def beside_a_late_rank(world: World, spec: CellSpec) -> dict[str, float | None]:
    context = RunContext(
        proved="",
        folder=Path(),
        keep=lambda _: time.sleep(0 if world.rank else LATE_S),
    )
    return run_cell(spec, world, context).metrics


LATE_S = 4.0


def test_no_phase_contains_what_the_first_rank_writes_meanwhile(tmp_path: Path) -> None:
    spec = short(alone("resources.ranks_per_node=2", "sharding=ddp"))
    found = on_ranks(2, beside_a_late_rank, spec, spec, folder=tmp_path)[0]
    phases = [found[f"{phase}_ms"] for phase in PHASES]
    assert all(ms is not None and ms < 1e3 * LATE_S / 2 for ms in phases), phases


def test_a_cell_is_proved_unless_it_was_or_trusts_its_techniques() -> None:
    spec = short(alone())
    asked = replace(spec, measurement=replace(spec.measurement, prove="twin"))
    assert run(spec).validity["proved"] == ""
    assert run(asked).validity["proved"].startswith("twin ")
    assert run(asked, proved="earlier").validity["proved"] == "earlier"


def test_a_run_keeps_a_sketch_of_its_first_gradients_unless_its_first_step_is_timed() -> None:
    kept = run(short(alone())).validity["first_gradients"]
    assert len([float(number) for number in kept.split()]) == 5
    assert run(short(alone("optimizer=sgd_foreach"))).validity["first_gradients"] == kept
    assert run(short(alone(), warmup=0)).validity["first_gradients"] is None


def test_a_trace_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    spec = short(alone())
    asked = replace(spec, measurement=replace(spec.measurement, trace=True))
    run(spec, folder=tmp_path / "none")
    run(asked, folder=tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["trace.json.gz"]
    assert not (tmp_path / "none").exists()


def test_the_same_seed_gives_the_same_losses_and_another_seed_others() -> None:
    def losses(seed: int) -> tuple[float | None, float | None]:
        found = run(short(alone(f"seed={seed}", "precision.dtype=float64"))).metrics
        return found["loss_step_1"], found["loss_last"]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_a_run_whose_loss_explodes_has_no_speed() -> None:
    with pytest.raises(DivergedError, match="NaN within 4 steps"):
        run(short(alone(*EXPLOSIVE)))


def test_a_training_whose_loss_explodes_has_no_accuracy() -> None:
    """The timed step was sound; what came after it was not."""
    training = alone(*EXPLOSIVE, "task=train", "task.epochs=1", "batch.images_per_step=128")
    with pytest.raises(DivergedError, match="NaN within 1 epochs"):
        run(short(training, warmup=0, measured=1, phases=0))


def test_training_tells_accuracy_and_time(tmp_path: Path) -> None:
    training = alone("task=train", "task.epochs=1", "batch.images_per_step=128")
    found = run(short(training), folder=tmp_path).metrics
    assert 0 < found["accuracy_top1"] < 1
    assert found["train_seconds"] > 0


def test_without_torchs_private_modules_optional_columns_are_empty_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("fake_collectives", "mem_tracker"):
        monkeypatch.setitem(sys.modules, f"torch.distributed._tools.{name}", None)
        monkeypatch.delattr(torch.distributed._tools, name, raising=False)
    found = run(short(alone()))
    for column in ("gathered_parameter_gib", "activation_gib", "gradient_bytes_per_step"):
        assert found.metrics[column] is None
    assert found.metrics["parameter_gib"] > 0
    assert found.metrics["images_per_second"] > 0
    assert "memory tracker" in found.environment["activation_gib_reason"]
    assert "collectives" in found.environment["sent_bytes_reason"]


def test_with_them_there_is_no_reason() -> None:
    found = run(short(alone()))
    assert found.metrics["activation_gib"] > 0
    assert found.environment["activation_gib_reason"] is None
    assert found.environment["sent_bytes_reason"] is None
