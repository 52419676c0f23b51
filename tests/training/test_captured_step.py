"""Steps that are recorded once and replayed train as steps that are not; the GPU's part is stood in for."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from tests.cells import TINY, entry
from tests.data.cells_and_worlds import world
from tests.training.alone import ONE, alone, batch, trainer_of, weights
from vitsweep.equivalence import prove
from vitsweep.errors import VitsweepError
from vitsweep.training.trainer import WARM_UP_STEPS, CapturedStep, CudaRecorder, Trainer

EXACT = ("precision.dtype=float64", "optimizer=adamw_loop")


class OnCpu:
    """Replays by doing the work again; its result lies in one place, as that of a graph does."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        self.calls.append("warm up")
        return work()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.calls.append("record")
        result = torch.zeros((), dtype=torch.float64)

        def replay() -> None:
            self.calls.append("replay")
            result.copy_(work())

        return replay, result


def captured(trainer: Trainer) -> OnCpu:
    """Let a trainer replay its steps."""
    recorder = OnCpu()
    trainer.captured = CapturedStep(trainer._eager_step, recorder)
    return recorder


@pytest.mark.parametrize("accumulation", [1, 2])
def test_replayed_steps_train_on_the_batch_they_are_given(accumulation: int) -> None:
    spec = alone(*EXACT, f"batch.accumulation_steps={accumulation}")
    plain, replayed = trainer_of(spec), trainer_of(spec)
    recorder = captured(replayed)
    steps = [
        [batch(10 * s + m, images=8 // accumulation) for m in range(accumulation)] for s in range(5)
    ]
    wanted = [float(plain.step(iter(parts))) for parts in steps]
    losses = [replayed.step(iter(parts)) for parts in steps]
    assert [float(loss) for loss in losses] == wanted, "no later step overwrites a loss"
    assert recorder.calls == ["warm up"] * WARM_UP_STEPS + ["record"] + ["replay"] * 3
    for name, value in weights(plain).items():
        assert torch.equal(weights(replayed)[name], value), name


def test_a_batch_of_another_shape_is_refused_by_name() -> None:
    trainer = trainer_of(alone(*EXACT))
    captured(trainer)
    for step in range(WARM_UP_STEPS + 1):
        trainer.step(iter([batch(step)]))
    with pytest.raises(VitsweepError, match="was recorded on"):
        trainer.step(iter([batch(9, images=4)]))


def test_a_step_that_cannot_be_recorded_fails_by_name() -> None:
    def fails(work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    trainer = trainer_of(alone(*EXACT))
    captured(trainer).record = fails  # type: ignore[method-assign]
    for step in range(WARM_UP_STEPS):
        trainer.step(iter([batch(step)]))
    with pytest.raises(
        VitsweepError, match=r"could not be recorded as a CUDA graph: operation not"
    ):
        trainer.step(iter([batch()]))


def test_a_recording_bears_other_threads_warms_up_on_one_stream_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[MagicMock] = []
    monkeypatch.setattr("torch.cuda.Stream", lambda: made.append(MagicMock()) or made[-1])
    for name in ("current_stream", "stream", "CUDAGraph", "graph", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", MagicMock())
    recorder = CudaRecorder()
    for _ in range(WARM_UP_STEPS):
        recorder.warm_up(lambda: torch.zeros(()))
    assert len(made) == 1
    recorder.record(lambda: torch.zeros(()))
    asked = torch.cuda.graph.call_args.kwargs  # type: ignore[attr-defined]
    assert asked == {"stream": made[0], "capture_error_mode": "thread_local"}
    assert torch.cuda.empty_cache.call_count == 1  # type: ignore[attr-defined]


def test_the_choice_makes_optimizers_capturable() -> None:
    """As on a GPU, but for the recording itself."""
    spec = alone("optimizer=adamw_fused")
    graphs = entry(*TINY, *ONE, "compilation=cuda_graphs").spec.compilation
    trainer = trainer_of(replace(spec, compilation=graphs))
    assert trainer.captured
    assert all(group["capturable"] for group in trainer.optimizer.param_groups)


@pytest.mark.parametrize("choice", ["cuda_graphs", "cuda_graphs_compiled"])
def test_the_proof_before_timing_reaches_replayed_steps(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[OnCpu] = []

    def on_cpu() -> OnCpu:
        recorders.append(OnCpu())
        return recorders[-1]

    monkeypatch.setattr("vitsweep.training.trainer.CudaRecorder", on_cpu)
    graphs = entry(*TINY, *ONE, f"compilation={choice}").spec.compilation
    prove(replace(alone(EXACT[0], "optimizer=sgd_loop"), compilation=graphs), world())
    assert all(recorder.calls.count("replay") >= 2 for recorder in recorders)
