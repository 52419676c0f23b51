"""The way of a cell from the command line to the folder of its sweep."""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from rich.console import Console

from hydra_plugins.vitsweep_launchers.plugin import CellLauncherPlugin
from tests.builders import of_present_code, run
from tests.cells import LAPTOP, THIS_LAPTOP, TINY, entry
from vitsweep.api import functions
from vitsweep.api.functions import (
    collected,
    console_for,
    measured,
    rows_of,
    submitted_rows,
)
from vitsweep.api.plan import _shared_machine, as_columns, machine_with, overview, plan
from vitsweep.api.session import Session, open_session, refuse_second, require_rounds
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError, SweepStopped
from vitsweep.launchers.base import LaunchRequest, LaunchResult, prepared
from vitsweep.planning.blocks import Noise, describe_detectable_effect
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.rates.profile import profile_named
from vitsweep.results.record import Status


class Recorded(CellLauncherPlugin):
    """A launcher of another machine: it keeps one block of each cell, of which every second is faster."""

    can_choose_rounds = True

    def __init__(self, fits: Callable[[PlannedCell], bool] = lambda _: True, **ends: Any) -> None:
        self.fits, self.ends, self.requests = fits, ends, list[LaunchRequest]()

    def machine(self) -> Any:
        return LAPTOP

    @contextmanager
    def launch_cells(self, request: LaunchRequest) -> Iterator[LaunchResult]:
        self.requests.append(request)
        with prepared(request) as sweep:
            runs = [
                run(
                    e.cell_id, "b0", 100 + n, Status.measured if self.fits(e) else Status.out_of_memory,
                    sweep=sweep.store.name, precision=e.composed.choices["precision"],
                )
                for n, e in enumerate(sweep.plan.runnable)
            ]  # fmt: skip
            for record in of_present_code(sweep.plan, runs):
                sweep.store.save_run(record)
            yield LaunchResult(store=sweep.store, plan=sweep.plan, **self.ends)


@pytest.fixture(scope="module")
def known() -> Session:
    """Of two precisions, each without and with a mesh that cannot be; its folder is nowhere."""
    typed = ["precision=O2,O1", "mesh.tensor=1,3", "sweep.prune_slowdown=3"]
    return open_session([*TINY, *typed], Console(quiet=True))


def part_of(
    session: Session, folder: Path, cells: slice = slice(None), launcher: Any = None
) -> Session:
    """The same session in a folder, with some of its cells; what it prints is in `console.file`."""
    config = dict(session.config) | {"sweep": session.config["sweep"] | {"folder": str(folder)}}
    some, console = session.cells[cells], Console(file=StringIO(), width=300)
    launcher = launcher or Recorded()
    return replace(session, cells=some, config=config, console=console, launcher=launcher)


VALID, IMPOSSIBLE = slice(None, None, 2), slice(1, None, 2)


def printed(session: Session) -> str:
    file = session.console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_what_a_launcher_measured_is_returned_in_the_order_of_the_command(
    known: Session, tmp_path: Path
) -> None:
    session = replace(part_of(known, tmp_path, VALID), machine=LAPTOP)
    before = overview(session)
    assert [(r["state"], r["runs"], r["is_baseline"]) for r in before.rows] == [
        ("runnable", 6, False), ("runnable", 6, False), ("runnable", 6, True),
    ]  # fmt: skip
    assert (before.store, before.screenings.total()) == (None, 3)
    with measured(session) as result:
        tables, cells = collected(result)
        rows = rows_of(cells, result.plan)
    assert [row["precision"] for row in rows] == ["O2", "O1"]
    assert [row["images_per_second"] for row in rows] == pytest.approx([100, 101])
    assert len(tables.cells) == len(cells) == 3
    assert [row["cell_id"] for row in submitted_rows(result.plan)] == [r["cell_id"] for r in rows]
    after = overview(session)
    assert after.store is not None
    assert [row["runs"] for row in after.rows] == [4] * 3, "one block is there, none is screened"
    other = overview(session, replace(LAPTOP, cores_per_node=64))
    threads = [
        {entry.spec.resources.threads_per_rank for entry in found.plan.entries.values()}
        for found in (after, other)
    ]
    assert threads == [{1}, {32}], "two ranks share the cores"
    with measured(replace(session, cells=session.cells[:1])) as result:
        tables, cells = collected(result)
    assert (len(tables.cells), len(cells)) == (3, 2), "those of the command and its baseline"


def test_a_stopped_command_keeps_its_result_and_ends_with_an_error(
    known: Session, tmp_path: Path
) -> None:
    for submitted in (False, True):
        launcher = Recorded(interrupted=True, submitted=submitted)
        session = part_of(known, tmp_path / str(submitted), VALID, launcher)
        stopped = measured(session)
        result, said = stopped.__enter__(), printed(session)
        with pytest.raises(SweepStopped):
            stopped.__exit__(None, None, None)
        assert len(list(result.store.runs())) == 3
        assert (printed(session) == said) == submitted


def test_a_sweep_without_a_cell_that_can_run_is_refused_with_its_reason(
    known: Session, tmp_path: Path
) -> None:
    session = replace(part_of(known, tmp_path, IMPOSSIBLE), machine=LAPTOP)
    plan = replace(session.plan, entries={e.cell_id: e for e in session.plan.named})
    with (
        pytest.raises(ImpossibleCellError, match=r"mesh\.tensor"),
        measured(session, plan) as result,
    ):
        collected(result)


def test_a_session_has_the_name_of_its_cells_and_the_rules_of_its_launcher(
    known: Session, tmp_path: Path
) -> None:
    session = part_of(known, tmp_path)
    assert session.settings.path == tmp_path / session.cells[0].tree["sweep"]["name"]
    assert session.settings.prune_slowdown == 3
    all_at_once = SimpleNamespace(can_choose_rounds=False)
    assert replace(session, launcher=all_at_once).settings.prune_slowdown is None
    named = dict(session.config) | {"sweep": session.config["sweep"] | {"name": "mine"}}
    assert replace(session, config=named).settings.path.name == "mine"
    assert session.searches is None
    for config in (
        {},
        {"tracker": None, "metric": {"columns": None}},
        {"tracker": {"mode": "none"}, "metric": None},
    ):
        changed = replace(session, config=config)
        assert (changed.tracker, changed.metrics) == (None, {})
    assert session.request().plan is session.plan
    part = replace(session.plan, entries=dict(list(session.plan.entries.items())[:1]))
    assert session.request(part).plan is part


def test_the_command_of_a_session_is_what_was_typed(known: Session, tmp_path: Path) -> None:
    typed = shlex.split(known.command)
    assert typed[:5] == ["python", "-m", "vitsweep", "-m", TINY[0]]
    assert typed[-1] == "sweep.prune_slowdown=3"
    (tmp_path / "conf").mkdir()
    quiet = Console(quiet=True)
    beside = open_session(["sweep.question='Is it?'"], quiet, tmp_path / "conf")
    words = [*typed[:3], "--config-dir", f"{tmp_path}/conf", "-m", "sweep.question='Is it?'"]
    assert shlex.split(beside.command) == words
    mine = open_session([], quiet, command="mine", machine=THIS_LAPTOP)
    assert (mine.command, mine.machine) == ("mine", THIS_LAPTOP)


def test_what_chooses_rounds_needs_a_launcher_that_can() -> None:
    plain = sweep_settings({"sweep": entry(*TINY).composed.tree["sweep"]})
    can, cannot = SimpleNamespace(can_choose_rounds=True), SimpleNamespace(can_choose_rounds=False)
    for chosen in (
        {"search": "race"},
        {"minutes": 3.0},
        {"limit": replace(plain.limit, key="model.depth")},
        {"screening": True},
    ):
        require_rounds(can, "mine", replace(plain, **chosen))
        for launcher in (cannot, BasicLauncher()):
            with pytest.raises(BadValueError, match="`hydra/launcher=mine`"):
                require_rounds(launcher, "mine", replace(plain, **chosen))
    for chosen in ({}, {"screening": False}, {"screening": "auto"}):
        require_rounds(cannot, "mine", replace(plain, **chosen))
        require_rounds(BasicLauncher(), "mine", replace(plain, **chosen))


def test_an_override_may_be_added_to_others_and_not_to_another_of_its_key() -> None:
    refuse_second(["seed=1", "precision=O1"], "sweep.name=a")
    refuse_second(["seed=1"], "seed=1")
    with pytest.raises(BadValueError, match="`seed=1` and `seed=2`"):
        refuse_second(["precision=O1", "seed=1"], "seed=2")


class Opened(Exception):
    """Instead of a session, the overrides that it would be opened with."""


def test_arguments_of_python_are_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def caught(overrides: list[str], console: Console, config_dir: Path | None) -> None:
        raise Opened(overrides, console.quiet, config_dir)

    monkeypatch.setattr(functions, "open_session", caught)
    local = "hydra/launcher=local"
    submits = ["hydra/launcher=slurm", "hydra.launcher.wait=false"]
    for typed, given, wanted in (
        ("seed=1", {}, ["seed=1", local]),
        ("seed=1", {"name": "a", "show": False}, ["seed=1", local, "sweep.name=a"]),
        ("", {"launcher": "slurm"}, submits),
        (
            "hydra.launcher.wait=true",
            {"launcher": "slurm"},
            ["hydra.launcher.wait=true", submits[0]],
        ),
        (
            "+hydra.launcher.wait=true",
            {"launcher": "slurm"},
            ["+hydra.launcher.wait=true", submits[0]],
        ),
        ("hydra/launcher=slurm", {}, ["hydra/launcher=slurm"]),
        ("", {"config_dir": tmp_path}, [local]),
    ):
        with pytest.raises(Opened) as seen:
            functions.sweep(typed, **given)
        quiet, folder = given.get("show") is False, given.get("config_dir")
        assert seen.value.args == (wanted, quiet, folder)
    with pytest.raises(Opened) as seen:
        functions.plan("seed=1")
    assert seen.value.args == (["seed=1", local], True, None)
    assert console_for(True).stderr
    assert not console_for(True).quiet


def test_a_node_of_a_profile_has_its_memory_and_its_devices() -> None:
    for name, gib, tf32 in (("h100", 80 - 3.3, True), ("v100", 32 - 3.3, False)):
        node = machine_with(profile_named(name))
        assert (node.device, node.devices_per_node, node.cores_per_node) == ("cuda", 8, 96)
        assert node.gib_per_device == node.least_gib == pytest.approx(gib)
        assert (node.described_by, node.has_tf32) == (profile_named(name).title, tf32)


def test_ranks_that_share_this_machine_are_named() -> None:
    two = ("resources.ranks_per_node=2", "batch.scope=per_replica")
    cases: Any = (
        ((), THIS_LAPTOP, []),
        (("resources.nodes=2", *two[1:]), THIS_LAPTOP, ["4 ranks", "2 nodes"]),
        (("resources.ranks_per_node=8", *two[1:]), THIS_LAPTOP, ["8 ranks", "1 node "]),
        (two, THIS_LAPTOP, []),
        (("resources.nodes=2", *two[1:]), LAPTOP, []),
    )
    for typed, machine, told in cases:
        planned = SimpleNamespace(
            runnable=[entry(*TINY, machine=machine), entry(*TINY, *typed, machine=machine)]
        )
        said = _shared_machine(planned, machine)  # type: ignore[arg-type]
        assert bool(said) == bool(told), typed
        assert all(f"{part}" in said for part in told)
    assert _shared_machine(SimpleNamespace(runnable=[]), THIS_LAPTOP) == ""  # type: ignore[arg-type]


def test_a_plan_of_several_devices_has_the_rows_of_each(
    known: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = part_of(known, tmp_path, slice(2, None))
    file = tmp_path / "plan.parquet"
    rows = plan(session, predict=False, hardware=["h100", "v100"], parquet=file)
    assert [row["hardware"] for row in rows] == ["h100"] * 3 + ["v100"] * 3
    assert [row["state"] for row in rows] == ["runnable", "invalid", "runnable"] * 2
    told = capsys.readouterr().out
    assert told.count("runnable 2 · invalid 1") == 2
    assert told.count("`mesh.tensor=3`") >= 2
    read = pd.read_parquet(file)
    assert list(read.columns[:3]) == ["cell_id", "cell", "precision"]
    assert read["reasons"].ne("").tolist() == [False, True, False] * 2
    assert {*read} & {"settings", "overrides"} == set()
    beside = told.partition("Plan of")[0]
    own = replace(session, machine=machine_with(profile_named("v100")))
    for hardware, is_told in ((["h100", "v100"], True), (["v100"], False)):
        plan(own, predict=False, hardware=hardware)
        before = capsys.readouterr().out.partition("Plan of")[0]
        assert (before != beside) == (profile_named("v100").title in before) == is_told
    here = plan(session, predict=False)
    assert [set(row) for row in here] == [set(rows[0]) - {"hardware"}] * 3
    table = as_columns([here[0] | {"peak_gib": 2.5, "reasons": ["a", "b"]}])
    [row] = table[["mesh.tensor", "peak_gib", "reasons"]].to_dict("records")
    assert list(row.values()) == ["1", 2.5, "a b"]


@pytest.mark.parametrize("wanted", ["precision=O1,O2 sharding=ddp,fsdp", "+sweep=first"])
def test_a_cell_is_composed_once_and_typed_once(wanted: str, tmp_path: Path) -> None:
    """Of five cells, one of which is the baseline that the others share."""
    calls: dict[str, Counter[str]] = {
        name: Counter() for name in ("_composed", "cell_from_tree", "_checked", "baseline_of")
    }

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_name) in calls:
            values = frame.f_locals
            first = values["parsed"] if name == "_composed" else next(iter(values.values()))
            calls[name][repr(first)] += 1

    sys.setprofile(count)
    try:
        words = [*TINY, *wanted.split(), f"sweep.folder={tmp_path}"]
        session = open_session(words, Console(quiet=True))
        found = overview(session)
        rows = found.rows
        with prepared(session.request()) as sweep:
            assert len(sweep.plan.entries) == len(rows) == 5
            said = describe_detectable_effect(sweep.plan, Noise())
            assert said in found.detectable_effect
            assert said or "baseline=null" in wanted
    finally:
        sys.setprofile(None)
    assert {max(found.values()) for found in calls.values()} == {1}
    assert len(calls["cell_from_tree"]) == 5
    assert len(calls["_composed"]) == 5 + 3  # the nodes `sweep`, `machine` and the default one
