"""What the predicted hours of a sweep cover, in the command and in its plan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hydra_plugins.vitsweep_launchers.plugin import LocalLauncher
from tests.cells import THIS_LAPTOP, TINY, composer
from tests.extras.predict.test_run_duration import prediction
from tests.extras.predict.traces import NOTHING_HELD, timed_before, trace_of
from tests.refusals import require
from vitsweep.api.plan import plan as show
from vitsweep.api.session import Session
from vitsweep.composition.grid import baseline_of
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.extras.predict import admission
from vitsweep.extras.predict.admission import without_left_out
from vitsweep.extras.predict.trace_pool import TraceCache
from vitsweep.planning.blocks import runs_per_cell
from vitsweep.planning.sweep_plan import SweepPlan, make_sweep_plan
from vitsweep.spec.resources import Machine

ALONE = (*TINY, "resources.ranks_per_node=1", "data=synthetic", "batch.resolution_px=8")
TWO = (("precision=fp32",), ("precision=bf16",))
"""The first is the baseline of both."""
MANY = tuple(
    (f"precision={precision}", f"memory={memory}")
    for precision in ("fp32", "bf16", "O1")
    for memory in ("keep_all", "recompute_blocks")
)
"""The first is the baseline of all."""


def planned(*cells: tuple[str, ...]) -> tuple[SweepPlan, SweepSettings]:
    composed = [composer().compose([*ALONE, *each]) for each in cells]
    plan = make_sweep_plan(composed, THIS_LAPTOP, lambda cell: baseline_of(cell, composer()))
    return plan, sweep_settings(composed[0].tree)


def kept_of(
    plan: SweepPlan, settings: SweepSettings, missing: Mapping[str, int], runs: float
) -> SweepPlan:
    """Return the plan within so many runs, all of the same length."""
    found = {key: prediction(entry.spec) for key, entry in plan.entries.items()}
    hours = [f.run_device_hours[0] for f in found.values() if f.run_device_hours]
    assert max(hours) == min(hours)
    return without_left_out(plan, replace(settings, max_gpu_hours=runs * hours[0]), found, missing)


def test_a_baseline_that_is_a_cell_is_counted_once() -> None:
    plan, settings = planned(*TWO)
    missing = dict.fromkeys(plan.entries, 1)
    assert len(kept_of(plan, settings, missing, 2.001).runnable) == 2
    assert len(kept_of(plan, settings, missing, 1.999).runnable) == 1


def test_runs_that_are_measured_cost_nothing() -> None:
    plan, settings = planned(*TWO)
    assert len(kept_of(plan, settings, {}, 0.001).runnable) == 2
    [fp32, bf16] = plan.entries
    assert len(kept_of(plan, settings, {bf16: 1}, 2.001).runnable) == 2
    assert [e.cell_id for e in kept_of(plan, settings, {bf16: 1}, 1.999).runnable] == [fp32]


@pytest.mark.parametrize("first", ["baseline", "variants"])
@pytest.mark.parametrize("cells_per_block", [1, 3, 100])
def test_the_runs_that_are_charged_are_those_of_the_plan(cells_per_block: int, first: str) -> None:
    cells = MANY if first == "baseline" else MANY[::-1]
    plan, settings = planned(*cells)
    baselines = {entry.baseline_id for entry in plan.runnable}
    assert len(baselines) == 1, "one for all"
    settings = replace(settings, cells_per_block=cells_per_block)
    missing = {cell: 1 + number % 3 for number, cell in enumerate(plan.entries)}
    runs = sum(runs_per_cell(plan, missing, cells_per_block).values())
    assert len(kept_of(plan, settings, missing, runs + 0.001).runnable) == len(cells)
    assert len(kept_of(plan, settings, missing, runs - 0.001).runnable) == len(cells) - 1


def test_cells_keep_no_baseline_that_the_hours_do_not_cover() -> None:
    plan, settings = planned(*TWO)
    [fp32, bf16] = plan.entries
    kept = kept_of(plan, settings, {fp32: 5, bf16: 1}, 4)
    assert [e.cell_id for e in kept.runnable] == [bf16]
    assert kept.entries[bf16].baseline_id is None


def test_a_training_of_unknown_length_is_refused_by_name() -> None:
    plan, settings = planned(("data=module", "task=train", "sweep.baseline=null"))
    entries = {key: replace(entry, reasons=()) for key, entry in plan.entries.items()}
    found = {key: prediction(entry.spec) for key, entry in entries.items()}
    kept = without_left_out(
        SweepPlan(entries),
        replace(settings, max_gpu_hours=1e9),
        found,
        dict.fromkeys(entries, 1),
    )
    [entry] = kept.entries.values()
    require(entry.reasons[0], "`sweep.max_gpu_hours=1e+09` `sweep.minutes`")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("VITSWEEP_PREDICT", "always")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def plan_of(
    *cells: tuple[str, ...], machine: Machine = THIS_LAPTOP, **request: Any
) -> list[dict[str, Any]]:
    """Show the plan of cells whose traces are made by hand; those of float32 are faster."""
    composed = [composer().compose([*ALONE, *each]) for each in cells]
    for each in make_sweep_plan(composed, machine, lambda c: baseline_of(c, composer())).runnable:
        calls = 100 if each.spec.precision.name == "fp32" else 10_000
        trace = trace_of(dispatches=calls, memory=replace(NOTHING_HELD, peak=2**20), device="cpu")
        TraceCache().put(TraceCache().key(each.spec), trace)
        timed_before(each.spec)
    session = Session(
        cells=composed,
        config=composed[0].tree,
        composer=composer(),
        launcher=LocalLauncher(),
        machine=machine,
        console=Console(quiet=True),
    )
    return show(session, **request)


@pytest.mark.usefixtures("traces")
def test_a_plan_leaves_out_what_the_command_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [(*each, "measurement=smoke") for each in TWO]
    rows = plan_of(*cells)
    hours = sum(row["device_hours"] for row in rows)
    assert [row["state"] for row in rows] == ["runnable", "runnable"]
    capsys.readouterr()
    rows = plan_of(*((*each, f"sweep.max_gpu_hours={0.9 * hours}") for each in cells))
    assert [row["state"] for row in rows] == ["runnable", "over budget"]
    assert [row["runs"] for row in rows] == [1, 0]
    shown = capsys.readouterr().out
    assert "`precision=bf16`" in shown
    assert "runnable 1 · over budget 1" in shown
    plan_of(*((*each, "measurement=standard", "sweep.prune_slowdown=1.01") for each in TWO))
    assert "1 cell of them would get a screening run alone" in capsys.readouterr().out
    monkeypatch.setattr(admission, "SECONDS_OF_A_PLAN", 0.0)
    monkeypatch.setattr(TraceCache, "get", lambda self, key: None)
    rows = plan_of(*cells)
    assert {row["why_not_predicted"] for row in rows} == {admission._NOT_TRACED}


@pytest.mark.usefixtures("traces")
def test_a_cell_on_a_cpu_is_not_timed_as_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    cell = ("resources.device=cpu", "sweep.baseline=null")
    [row] = plan_of(cell, hardware=("h100",))
    assert "step_time_ms" not in row
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("`resources.device=cpu`", "`--hardware h100`"))


@pytest.mark.usefixtures("traces")
def test_each_hardware_has_its_title_even_where_no_cell_can_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan_of(("mesh.tensor=2", "sweep.name=none"), hardware=("h100", "rtx_4090"))
    shown = capsys.readouterr().out
    assert "on NVIDIA H100" in shown
    assert "on NVIDIA GeForce RTX 4090" in shown


def test_a_cell_without_a_step_time_is_not_free() -> None:
    plan, settings = planned(*TWO)
    [fp32, bf16] = plan.entries
    found = {fp32: prediction(plan.entries[fp32].spec)}
    within = replace(settings, max_gpu_hours=1e9)
    kept = without_left_out(plan, within, found, dict.fromkeys(plan.entries, 1))
    assert [e.cell_id for e in kept.runnable] == [fp32]
    require(kept.entries[bf16].reasons[0], "`sweep.max_gpu_hours=1e+09` `sweep.minutes`")
