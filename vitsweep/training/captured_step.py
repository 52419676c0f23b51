"""A whole training step recorded as one CUDA graph and replayed (needs torch)."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from vitsweep.errors import VitsweepError

MicroBatch = tuple[Tensor, Tensor]
WARM_UP_STEPS = 2
"""Steps before the recording: libraries choose kernels, the optimizer allocates its state."""


class Recorder(Protocol):
    """What records kernels; another one lets the rest be tested without a GPU."""

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        """Run `work` as it will be recorded, outside of a recording."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record `work` without running it; return what replays it, and where its result will lie."""


class CudaRecorder:
    """CUDA graphs, as in torch's "whole-network capture" (pytorch.org/docs/stable/notes/cuda.html)."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        """Run on a side stream: a recording must not depend on work of the default one.

        It is the same in all steps, since the allocator keeps the blocks of each stream apart.
        """
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = work()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture into one graph with a memory pool of its own.

        Only calls of this thread can spoil the recording: a loader's thread that pins memory may go on.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        torch.cuda.empty_cache()  # of the warm-up, which the graph's own pool cannot use
        return graph.replay, result


class CapturedStep:
    """Runs the first steps as they are, records the next one, and replays it from then on.

    A graph reads and writes fixed addresses: every batch is copied to where the recorded one lay.

    Args:
        step: trains on the micro-batches of one step; returns the mean loss. It reads no value of the
            device and keeps nothing in Python that the next step depends on.
        recorder: of kernels.
    """

    def __init__(
        self, step: Callable[[Iterator[MicroBatch]], Tensor], recorder: Recorder | None = None
    ) -> None:
        self._step = step
        self._recorder = recorder or CudaRecorder()
        self._warm_up_left = WARM_UP_STEPS
        self._inputs: list[MicroBatch] = []
        self._replay: Callable[[], object] | None = None
        self._loss: Tensor | None = None

    def __call__(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Train on one step's micro-batches; return the mean loss, which no later step overwrites.

        Raises:
            VitsweepError: the step cannot be recorded, or a batch has another shape than the recorded
                one. Nothing is left out of a graph silently.
        """
        if self._warm_up_left:
            self._warm_up_left -= 1
            return self._recorder.warm_up(lambda: self._step(iter(micro_batches)))
        if self._replay is None:
            self._record(micro_batches)
        self._copy_inputs(micro_batches)
        assert self._replay is not None
        assert self._loss is not None
        self._replay()
        return self._loss.clone()

    def _record(self, micro_batches: list[MicroBatch]) -> None:
        self._inputs = [(images.clone(), labels.clone()) for images, labels in micro_batches]
        try:
            self._replay, self._loss = self._recorder.record(lambda: self._step(iter(self._inputs)))
        except RuntimeError as error:
            raise VitsweepError(
                "The training step could not be recorded as a CUDA graph: "
                f"{str(error).splitlines()[0]} Use `compilation=compile_blocks`."
            ) from error

    def _copy_inputs(self, micro_batches: list[MicroBatch]) -> None:
        found = [[(tuple(t.shape), t.dtype) for t in pair] for pair in micro_batches]
        recorded = [[(tuple(t.shape), t.dtype) for t in pair] for pair in self._inputs]
        if found != recorded:
            raise VitsweepError(
                f"The CUDA graph of the training step was recorded on {recorded} and cannot run on {found}."
            )
        for given, kept in zip(micro_batches, self._inputs, strict=True):
            for new, old in zip(given, kept, strict=True):
                old.copy_(new, non_blocking=True)
