"""Which runs of blocks are made on this machine, and what ends them; the runs themselves are made up."""

import contextlib
import errno
import io
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.builders import run
from tests.cells import entry
from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import Run
from vitsweep.execution.runner import LocalExecutor, RunEnding
from vitsweep.launchers import local
from vitsweep.launchers.base import PreparedSweep
from vitsweep.launchers.local import CommandLoop, Lifetime, runs_of
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import Block
from vitsweep.planning.pending import ResumeState
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.results.store import Store


class Made:
    """Stands in for the runner of ranks: each run ends as was asked, by cell and block."""

    def __init__(self, ends: dict[str, str], executor: LocalExecutor) -> None:
        self.ends, self.executor, self.done = ends, executor, list[str]()

    def request(self, run: Any, cell: Any, planned: Any) -> Any:
        return SimpleNamespace(run=run)

    def attempt(self, request: Any, cell: Any) -> RunRecord:
        place = request.run
        self.done.append(f"{place.block}{place.position}{place.cell_id}")
        end = self.ends.get(place.cell_id, "measured")
        if end == "full":
            raise OSError(errno.ENOSPC, "full")
        if end == "unheard":
            raise OSError(errno.EPERM, "unheard")
        is_stopped = end in ("ctrl-c", "finished")
        record = run(
            place.cell_id, place.block, 9.0, Status.measured if is_stopped else Status(end)
        )
        if is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
        if end == "finished":
            ending = RunEnding("The command was interrupted.", 0.0)
            ending.record = record
            raise ending
        return record

    def warm_up(self, request: Any, cell: Any) -> RunRecord:
        self.done.append(f"warm{request.run.cell_id}")
        return run(request.run.cell_id, "w", 9.0)


@pytest.fixture
def cells() -> list[PlannedCell]:
    found = []
    for name in "pab":
        cell = replace(entry("measurement.blocks=5"), baseline_id="p")
        cell.__dict__["cell_id"] = name
        cell.__dict__["code"] = SimpleNamespace(hash="h")
        found.append(cell)
    return found


def ran(store: Store, blocks: list[Block], ends: dict[str, str], **more: Any) -> tuple[Any, ...]:
    trainings = more.pop("trainings", ())
    made: Any = Made(ends, LocalExecutor(store, {}))
    progress = Progress(Console(file=io.StringIO()), {name: name for name in "pab"}, 6)
    lifetime = Lifetime()
    made.on_wait = lifetime.check
    loop = CommandLoop(runner=made, progress=progress, lifetime=lifetime, **more)
    is_stopped = loop.run(runs_of(blocks, trainings))
    return loop, made.done, is_stopped, progress


def test_a_cell_that_ended_by_itself_gets_no_other_run(store: Store, cells: Any) -> None:
    blocks = [Block(name, tuple(cells)) for name in "xy"]
    first = ["warmp", "x0p", "x1a", "x2b"]
    for status, again, left in (
        ("failed", [], {"a"}),
        ("out_of_memory", [], {"a"}),
        ("killed", ["y1a"], set()),
        ("preempted", ["y1a"], set()),
        ("measured", ["y1a"], set()),
    ):
        runner, done, is_stopped, progress = ran(store, blocks, {"a": status})
        assert done == [*first, "y0p", *again, "y2b"]
        assert (runner.skipped, is_stopped) == (left, False)
        assert len(runner.records) == 5 + len(again)
        assert progress.reached == f"{5 + len(again)} of {5 + len(again)} runs"


def test_the_machine_is_warmed_up_before_the_first_block_alone(store: Store, cells: Any) -> None:
    block = Block("x", tuple(cells))
    for first, more, begin in (
        (block, {}, "warmp"),
        (replace(block, purpose=SCREENING), {}, "x0p"),
        (block, {"skipped": {"p"}}, "x1a"),
        (replace(block, first_position=4), {}, "warmp"),
    ):
        _, done, *_ = ran(store, [first], {}, **more)
        assert done[0] == begin
    assert done[1:] == ["x4p", "x5a", "x6b"]
    assert ran(store, [], {})[1:3] == ([], False)


def test_a_saved_training_goes_on_in_its_block(store: Store, cells: Any) -> None:
    saved = SimpleNamespace(run=Run("x", 7, "a", "old"))
    done = ran(store, [Block("x", tuple(cells))], {}, trainings=[saved])[1]
    assert done[1:] == ["x0p", "x7a", "x2b"]


def test_ctrl_c_lets_the_run_end_and_starts_no_other(store: Store, cells: Any) -> None:
    for end in ("ctrl-c", "finished"):  # the ranks were waited for, or had just finished
        runner, done, is_stopped, progress = ran(
            store, [Block(n, tuple(cells)) for n in "xy"], {"a": end}
        )
        assert (done[1:], is_stopped) == (["x0p", "x1a"], True)
        assert [record.cell_id for record in runner.records] == ["p", "a"]
        assert progress.reached == "2 of 6 runs"
    with pytest.raises(RunEnding) as ending:
        runner.lifetime.check()
    assert (ending.value.seconds_to_save, ending.value.is_forced()) == (
        local.SECONDS_TO_SAVE,
        False,
    )
    runner.lifetime.is_forced = True
    assert ending.value.is_forced()


def test_a_full_disk_is_a_sentence_and_any_other_error_itself(store: Store, cells: Any) -> None:
    with pytest.raises(VitsweepError):
        ran(store, [Block("x", tuple(cells))], {"a": "full"})
    with pytest.raises(OSError, match="unheard"):
        ran(store, [Block("x", tuple(cells))], {"a": "unheard"})


def test_records_say_where_the_command_looked_at_its_intervals(
    store: Store, cells: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"git_commit": "c", "git_dirty": True}
    plan = SweepPlan({cell.cell_id: cell for cell in cells[:1]})
    request = SimpleNamespace(
        console=Console(file=io.StringIO()), settings=SimpleNamespace(minutes=1.0), rounds=None
    )
    for any_look in (False, True):
        rounds = Rounds(any_look, [Block("x", tuple(cells[:1]))])
        monkeypatch.setattr(local, "rounds_of", lambda *_, rounds=rounds, **__: rounds)
        monkeypatch.setattr(local, "announce", lambda *_: None)
        facts, ends = [], Lifetime(time.monotonic() + 60, "hydra.launcher.minutes=1")

        def opened(store: Store, given: Any, facts: Any = facts, ends: Any = ends) -> Any:
            facts.append(dict(given))
            ends.ends_at = 0.0
            return contextlib.nullcontext(LocalExecutor(store, given))

        sweep = PreparedSweep(store=store, plan=plan, code=code)
        result = local._run(sweep, request, opened, ends)  # type: ignore[arg-type]
        assert facts == [code | ({"any_look": True} if any_look else {})]
        assert (result.cut_short, result.interrupted) == (True, False)
        said = " ".join(request.console.file.getvalue().split())
        assert "`hydra.launcher.minutes=1` are left: give it more." in said
        result = local._run(sweep, request, opened, Lifetime(0.0, "x"))  # type: ignore[arg-type]
        assert (result.cut_short, len(facts)) == (True, 1), "no node is asked for nothing"
        said = " ".join(request.console.file.getvalue().split())
        assert said.endswith("`x` are left: give it more.")


def test_the_same_command_goes_on_where_its_time_is_enough_for_the_run(
    cells: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "seconds_of_block", lambda *_: 50.0)
    run, lifetime = Run.new("x", 0, "p"), Lifetime(time.monotonic() + 9, "x")
    for most_s, helps in ((40.0, "give it more."), (60.0, "the same command goes on.")):
        assert lifetime.lacks(run, cells[0], [], most_s).endswith(helps)
    assert Lifetime().lacks(run, cells[0], []) == ""


@dataclass
class Rounds:
    """Blocks of a command, one round of them."""

    is_bounded: bool
    blocks: list[Block]
    earlier: tuple[RunRecord, ...] = ()

    def state(self, records: Any) -> ResumeState:
        return ResumeState({}, {})

    def next(self, records: Any) -> list[Block]:
        return self.blocks

    def num_runs(self, records: Any) -> "Counter[str]":
        return Counter()

    def to_resume(self) -> tuple[dict[str, int], int]:
        return {}, 8


@pytest.fixture
def store(tmp_path: Any) -> Store:
    return Store(tmp_path / "s").create()
