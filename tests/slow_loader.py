"""Real digits from a loader that is slower than the model: batches come late, and in bursts."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.data.digits import Digits
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches

if TYPE_CHECKING:
    from vitsweep.world import World

SECONDS_PER_BATCH = 0.2
BURST = 4
"""Batches that become ready at once, as from so many loader workers in step."""
AHEAD = 8
"""Batches that the loader holds ready."""


@dataclass(frozen=True, kw_only=True)
class SlowDigits(Digits):
    """Digits whose loader makes a batch every 200 ms and writes when each one was asked for."""

    def open(self, cell: CellSpec, world: "World") -> Batches:
        log = Path.cwd() / f"requests-rank{world.rank}.log"
        return SlowBatches(super().open(cell, world), log)


class SlowBatches(Batches):
    """Batches of another, made by a thread that sleeps; `log` has the time of every request."""

    def __init__(self, of: Batches, log: Path) -> None:
        self.num_train, self.num_test, self.prefetched = of.num_train, of.num_test, AHEAD
        self._of, self._log, self._queue = of, log, queue.Queue[Any](AHEAD)
        threading.Thread(target=self._make, daemon=True).start()

    def _make(self) -> None:
        epoch = 0
        while True:
            for number, batch in enumerate(self._of.train(epoch)):
                if number % BURST == 0:
                    time.sleep(BURST * SECONDS_PER_BATCH)
                self._queue.put(batch)
            epoch += 1

    def train(self, epoch: int, first: int = 0) -> Iterator[Any]:
        while True:
            with self._log.open("a") as log:
                print(time.perf_counter(), file=log)
            yield self._queue.get()

    def test(self) -> Iterator[Any]:
        return self._of.test()
