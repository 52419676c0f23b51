"""Tables and report at the end of a command are written under the sweep's lock."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from tests.cells import TINY, composer
from vitsweep.cli import hydra_detour, summary
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.freeze import freeze, open_store
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.record import Status
from vitsweep.spec.resources import Machine


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchResult, list[Any]]:
    """A command whose cell has run, and what `summarize` finds: whether the sweep is locked."""
    monkeypatch.chdir(tmp_path)
    cells = expand([*TINY, "sweep.baseline=null"], composer())
    settings = sweep_settings(cells[0].tree)
    plan = plan_of(cells, Machine.here(), composer())
    freeze(store := open_store(settings), plan, settings, {})
    seen: list[Any] = []

    def is_locked(result: LaunchResult, *_: Any, **__: Any) -> list[dict[str, Any]]:
        with (store.root / ".lock").open("w") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(result.store.root)
        return [{"status": Status.measured}]

    monkeypatch.setattr(summary, "summarize", is_locked)
    return LaunchResult(store=store, plan=plan), seen


def test_of_ranks_that_torchrun_started(
    finished: tuple[LaunchResult, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, seen = finished
    [cell] = result.plan.entries.values()
    returned = result, sweep_settings(cell.composed.tree)
    monkeypatch.setattr(hydra_detour, "run_in_place", lambda _: returned)
    assert hydra_detour.run_part([]) == 0
    assert seen == [result.store.root]


def test_of_a_stock_launcher_of_hydra(finished: tuple[LaunchResult, list[Any]]) -> None:
    result, seen = finished
    cells = [entry.composed for entry in result.plan.entries.values()]
    hydra_detour._summarize_stock(cells, cells[0].tree, composer(), None)
    assert seen == [result.store.root]
