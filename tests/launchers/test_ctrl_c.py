"""Ctrl-C while runs go on."""

import io
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.cells import LAPTOP, TINY, composer
from vitsweep.execution.run_request import Run
from vitsweep.execution.runner import LocalExecutor, RunEnding
from vitsweep.launchers.local import CommandLoop, Lifetime
from vitsweep.launchers.progress import Progress
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.results.store import Store


def test_it_is_acknowledged_at_once_and_a_second_one_ends_a_training_that_saves_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path).create()
    entry, other = (plan_cell(composer().compose([*TINY, f"seed={n}"]), LAPTOP) for n in (1, 2))
    lifetime, out = Lifetime(), io.StringIO()
    started, saving, saved = threading.Event(), threading.Event(), threading.Event()

    def attempt(request: Any, spec: Any) -> None:
        started.set()
        for _ in range(6000):
            try:
                lifetime.check()
            except RunEnding as ending:
                saving.set()
                if ending.is_forced():
                    raise
            time.sleep(0.01)
        saved.set()

    def ctrl_c() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # a real signal: only that ends a wait for a lock

    def press() -> None:
        started.wait()
        ctrl_c()
        saving.wait()
        while "Stopping; Ctrl-C again to force." not in out.getvalue():
            time.sleep(0.01)
        ctrl_c()

    threading.Thread(target=press, daemon=True).start()
    begun: list[str] = []
    progress = Progress(
        Console(file=out), dict.fromkeys((entry.cell_id, other.cell_id), "plain"), 2
    )
    monkeypatch.setattr(progress, "started", lambda cell: begun.append(cell.cell_id))
    made: Any = SimpleNamespace(
        executor=LocalExecutor(store, {}),
        on_wait=lifetime.check,
        request=lambda *_, **__: None,
        attempt=attempt,
    )
    loop = CommandLoop(runner=made, progress=progress, lifetime=lifetime)
    assert loop.run([(Run.new("b", 0, e.cell_id), e) for e in (entry, other)])
    assert loop.records == []
    assert begun == [entry.cell_id]
    assert not saved.is_set(), "the training was waited for"
