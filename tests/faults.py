"""Techniques that do to a rank what happens on real machines."""

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.spec.model_parallel import SequenceParallel
from vitsweep.spec.technique import Memory
from vitsweep.techniques.sequence_parallel.ulysses import Ulysses
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, INFO_FILE, MEASUREMENT_FILE

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Fault(SequenceParallel):
    """Something happens to one rank while the model is being parallelized."""

    rank: int

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        if world.rank == self.rank:
            self.strike()
        return model

    def strike(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    def strike(self) -> None:
        raise KeyError("a bug in a technique")


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class KillSecondRun(Fault):
    """Kills the rank in the second run of a command, counted in a file of the working directory."""

    def strike(self) -> None:
        with open("runs_so_far", "a+") as file:
            file.write("x")
            file.flush()
            file.seek(0)
            if len(file.read()) == 2:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Leave(Fault):
    def strike(self) -> None:
        os._exit(9)


@dataclass(frozen=True, kw_only=True)
class NoSpace(Fault):
    def strike(self) -> None:
        raise RuntimeError("a writer failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    def strike(self) -> None:
        time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class LateOutOfMemory(Fault):
    """The rank lacks memory as soon as the timed steps of its run are on disk."""

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        def check(module: "nn.Module", inputs: object) -> None:
            drafts = Path().glob("results/*/cells/*/attempts/*/draft.json")
            if world.rank == self.rank and any(drafts):
                raise MemoryError("cannot allocate memory: 4.00 GiB")

        model.register_forward_pre_hook(check)
        return model


@dataclass(frozen=True, kw_only=True)
class Shorter(Ulysses):
    """One rank loses a token of its share."""

    rank: int

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        model = super().apply(model, world)
        if world.rank == self.rank:
            model.blocks.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, 1:], None))
        return model


@dataclass(frozen=True, kw_only=True)
class Held(Fault):
    """Waits while there are as many records as the file `allowed` of the working directory says.

    Then there is a file `held`: a test acts while the run goes on.
    """

    def strike(self) -> None:
        while len(list(Path().glob("results/*/cells/*/runs/*.json"))) >= int(
            Path("allowed").read_text()
        ):
            Path("held").touch()
            time.sleep(0.05)


@dataclass(frozen=True, kw_only=True)
class Scaled(Memory):
    """A wrong technique: it doubles the gradients of the head."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.head.weight.register_hook(lambda gradient: 2 * gradient)
        return model


@dataclass(frozen=True, kw_only=True)
class Exploding(Memory):
    """A model whose output becomes inf."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.head.register_forward_hook(lambda module, inputs, output: output / 0)
        return model


@dataclass(frozen=True, kw_only=True)
class SlowSteps(Memory):
    """Sleeps in each forward pass, so that steps take many times as long as without it."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.head.register_forward_hook(_sleep(times=60, every=1))
        return model


@dataclass(frozen=True, kw_only=True)
class Stalls(Memory):
    """Sleeps in every fourth forward pass: most steps are as fast as without it."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.head.register_forward_hook(_sleep(times=5, every=4))
        return model


def _sleep(times: float, every: int) -> Callable[..., None]:
    """Return a hook that sleeps in some of its calls, `times` as long as its rank computed since the last.

    So steps become as much slower on any machine.
    """
    calls, last = itertools.count(1), time.process_time()

    def sleep(*_: object) -> None:
        nonlocal last
        now = time.process_time()
        if next(calls) % every == 0:
            time.sleep(min(2.0, times * (now - last)))
        last = now

    return sleep


@dataclass(frozen=True, kw_only=True)
class HeldTraining(Memory):
    """Rank 0 of the first training waits, once, until it is requested to stop.

    Then there is a file `held` in the working directory.
    """

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.register_forward_pre_hook(lambda module, inputs: _hold_once())
        return model


def _hold_once() -> None:
    import torch.distributed as dist

    from vitsweep.execution.worker import _stop_requested

    measured = f"results/*/cells/*/attempts/*/{CHECKPOINT_FOLDER}/{MEASUREMENT_FILE}"
    if dist.get_rank() or Path("held").exists() or not any(Path().glob(measured)):
        return
    Path("held").touch()
    _stop_requested.wait()


@dataclass(frozen=True, kw_only=True)
class KilledTraining(Memory):
    """Rank 1 kills itself in a training, once, as soon as there is a checkpoint of trained steps.

    Then there is a file `killed` in the working directory.
    """

    def apply(self, model: "nn.Module") -> "nn.Module":
        model.register_forward_pre_hook(lambda module, inputs: _kill_once())
        return model


def _kill_once() -> None:
    import torch.distributed as dist

    whole = f"results/*/cells/*/attempts/*/{CHECKPOINT_FOLDER}/step-*[1-9]*/{INFO_FILE}"
    if dist.get_rank() == 1 and not Path("killed").exists() and any(Path().glob(whole)):
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def ends_its_process(record: Any, samples: dict[str, Any]) -> float:
    """A metric that cannot be computed."""
    raise SystemExit(3)


def times_called(record: Any, samples: dict[str, Any]) -> int:
    """A metric: how often it was computed for this run."""
    calls = Path(f"{record.run_id}.calls")
    with calls.open("a") as file:
        file.write("x")
    return calls.stat().st_size
