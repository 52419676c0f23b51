"""Cells that predictions leave out before anything runs, and those that they must not touch."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cells import GPU_NODE, THIS_LAPTOP, TINY, composer
from tests.extras.predict.traces import NOTHING_HELD, moved, timed_before, trace_of
from tests.refusals import named
from vitsweep.api.functions import all_refused
from vitsweep.composition.grid import baseline_of
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.extras.predict import prediction
from vitsweep.extras.predict.admission import admitted, minutes
from vitsweep.extras.predict.prediction import PROCESS_GIB, CellPrediction, predict_cells
from vitsweep.extras.predict.trace_pool import TraceCache
from vitsweep.files import write_atomically
from vitsweep.planning.freeze import planned_store
from vitsweep.planning.sweep_plan import SweepPlan, make_sweep_plan
from vitsweep.rates.profile import profile_named
from vitsweep.results.store import Store
from vitsweep.spec.resources import HERE, Machine

MIB = 2**20
NO_STORE = Store(Path("a sweep that has no folder"))
CLUSTER = replace(GPU_NODE, described_by="partition gpu", gib_per_device=100 / 1024)
ALONE = ("resources.ranks_per_node=1", "data=synthetic", "batch.resolution_px=8")
LARGE = "batch.images_per_step=4096"


@pytest.fixture(autouse=True)
def always_predicting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("VITSWEEP_PREDICT", "always")


def planned(*cells: tuple[str, ...], machine: Machine = CLUSTER) -> tuple[SweepPlan, SweepSettings]:
    composed = [composer().compose([*TINY, *ALONE, *each]) for each in cells]
    plan = make_sweep_plan(composed, machine, lambda cell: baseline_of(cell, composer()))
    return plan, sweep_settings(composed[0].tree)


def traced(plan: SweepPlan, mib: float, **changes: Any) -> None:
    """Keep a trace with this peak for every cell of a plan."""
    held = replace(NOTHING_HELD, peak=round(mib * MIB))
    for entry in plan.runnable:
        trace = trace_of(
            moved(12_000), memory=held, **{"device": entry.spec.resources.device} | changes
        )
        TraceCache().put(TraceCache().key(entry.spec), trace)


def refused(plan: SweepPlan, settings: SweepSettings, machine: Machine = CLUSTER) -> list[str]:
    found = admitted(plan, settings, Console(quiet=True), machine, NO_STORE)
    return [" ".join(entry.reasons) for entry in found.entries.values() if entry.reasons]


def test_a_cell_beyond_the_memory_of_the_clusters_gpus_is_refused_with_the_figures() -> None:
    plan, settings = planned((LARGE, "precision=O1"))
    traced(plan, 1024)
    reasons = refused(plan, settings)
    assert len(reasons) == 2, "the cell and its baseline"
    for reason in reasons:
        assert {"1", "0.1", "`sweep.try_anyway=true`"} <= named(reason)


def test_cells_keep_no_baseline_that_is_refused() -> None:
    plan, settings = planned((LARGE, "precision=O1"))
    for entry in plan.runnable:
        own = SweepPlan({entry.cell_id: entry})
        traced(own, 1024 if entry.is_added_baseline else 1)
    found = admitted(plan, settings, Console(quiet=True), CLUSTER, NO_STORE)
    [runnable] = found.runnable
    assert runnable.baseline_id is None


@pytest.mark.parametrize(
    ("mib", "changes", "why"),
    [
        (105, {}, "the prediction may be wrong by so much"),
        (1024, {"notes": ("counted as the eager step",)}, "another choice was traced"),
    ],
)
def test_what_may_fit_is_submitted(mib: float, changes: dict[str, Any], why: str) -> None:
    plan, settings = planned((LARGE,))
    traced(plan, mib, **changes)
    assert not refused(plan, settings), why


def test_cells_of_jobs_take_as_long_as_on_the_gpus_that_their_type_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Types that differ in memory alone tell the step time; this machine's GPU says nothing of it."""
    plan, settings = planned(())
    traced(plan, 1)
    cells = {entry.cell_id: entry.spec for entry in plan.runnable}
    monkeypatch.setattr(prediction, "_profile_here", lambda: profile_named("b200"))

    def predicted(*profiles: str) -> CellPrediction:
        return next(
            iter(predict_cells(cells, machine=replace(CLUSTER, profiles=profiles)).values())
        )

    for types, title in (
        (("h100",), "NVIDIA H100"), (("v100", "v100_16g"), "NVIDIA V100"),
        (("a100_40g", "a100_80g"), "unknown kind"), ((), "unknown kind"),
    ):  # fmt: skip
        step = predicted(*types).step_time
        assert step, types
        assert title in step.rates, types
        by_name = next(iter(predict_cells(cells, types[0]).values())) if types else None
        is_known = "unknown" not in title
        assert (by_name is not None and by_name.step_time == step) is is_known, types
    unknown = predict_cells(cells, machine=replace(CLUSTER, profiles=(), gib_per_device=None))
    assert {each.limit_bytes for each in unknown.values()} == {None}
    here = predict_cells(cells, machine=replace(CLUSTER, described_by=HERE))
    assert all(each.step_time and "B200" in each.step_time.rates for each in here.values())

    machine = replace(CLUSTER, profiles=("h100",))
    console = Console(record=True, width=200, file=StringIO())
    hours = predicted("h100").run_device_hours
    assert hours
    limit = replace(settings, max_gpu_hours=1.1 * hours[0])
    kept = admitted(plan, limit, console, machine, NO_STORE)
    assert "NVIDIA H100" in console.export_text()
    unknown_plan = admitted(plan, limit, console, replace(machine, profiles=()), NO_STORE)
    assert len(kept.runnable) >= len(unknown_plan.runnable)
    minutes_of = [minutes(plan.runnable, Store(tmp_path / n), replace(machine, profiles=names))
                  for n, names in (("a", ("h100",)), ("b", ()))]  # fmt: skip
    assert minutes_of[0].keys() == minutes_of[1].keys()
    assert minutes_of[0] != minutes_of[1]


def test_nothing_is_traced_where_a_formula_shows_that_cells_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "predict_cells", _not_called)
    assert not refused(*planned((), ("precision=O2",)))


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (CLUSTER, {"try_anyway": True}),
        (replace(CLUSTER, gib_per_device=None), {}),
        (replace(CLUSTER, described_by=HERE), {}),
    ],
    ids=["on demand", "unknown GPUs", "this machine"],
)
def test_no_cell_is_looked_at(
    machine: Machine, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "predict_cells", _not_called)
    plan, settings = planned((LARGE,))
    assert not refused(plan, replace(settings, **changes), machine)


def test_on_cpus_the_budget_of_a_cell_counts_and_not_the_machine_of_the_command() -> None:
    cpu = Machine(device="cpu", cores_per_node=8, devices_per_node=0, described_by="partition cpu")
    plan, settings = planned((LARGE, "resources.memory_gib_per_rank=0.1"), machine=cpu)
    traced(plan, 2048)
    assert len(refused(plan, settings, cpu)) == 1
    plan, settings = planned((LARGE,), machine=cpu)
    traced(plan, 1e9)
    assert not refused(plan, settings, cpu)


def test_only_what_fits_and_only_so_many_hours_hold_on_any_machine() -> None:
    here = replace(CLUSTER, described_by=HERE)
    plan, settings = planned((LARGE,), machine=here)
    traced(plan, 1024)
    assert refused(plan, replace(settings, only="fits"), here)
    assert "predicted hours" in refused(plan, replace(settings, max_gpu_hours=1e-9), here)[0]


def test_only_what_was_predicted_before_the_first_run_is_kept(tmp_path: Path) -> None:
    plan, _ = planned(("sweep.baseline=null",), ("precision=O1",), machine=THIS_LAPTOP)
    store, (first, second) = Store(tmp_path), plan.runnable
    assert minutes(plan.runnable, store, THIS_LAPTOP) == {}, "nothing was traced"
    traced(plan, 1)
    runs = store.cell(second.cell_id) / "runs"
    runs.mkdir(parents=True)
    (runs / "block-000000.json").write_text("{}")
    minutes(plan.runnable, store, THIS_LAPTOP)
    kept = store.prediction(first.cell_id)
    assert kept["predicted_peak_gib"] == pytest.approx(PROCESS_GIB + 1 / 1024)
    assert not store.is_predicted(second.cell_id), "it has run already"
    traced(plan, 2)
    minutes(plan.runnable, store, THIS_LAPTOP)
    assert store.prediction(first.cell_id) == kept, "the first one stays"
    path = store.cell(first.cell_id) / "prediction.json"
    assert kept["predicted_at"] == json.loads(path.read_text())["made_at"]
    assert str(kept["predicted_at"]).startswith("20")


def test_a_sweep_on_this_machine_adopts_what_was_planned_and_when(tmp_path: Path) -> None:
    plan, settings = planned(("sweep.baseline=null",), ("precision=O1",), machine=THIS_LAPTOP)
    traced(plan, 1)
    later, (first, second) = Store(tmp_path / "later").create(), plan.runnable
    admitted(plan, replace(settings, only="fits"), Console(quiet=True), THIS_LAPTOP, NO_STORE)
    shown = planned_store(THIS_LAPTOP.device)
    path = later.cell(second.cell_id) / "prediction.json"
    write_atomically(path, '{"predicted_peak_gib": 7.0}')
    for entry in plan.runnable:
        later.adopt_prediction(entry.cell_id, shown)
    kept = later.prediction(first.cell_id)
    assert kept == shown.prediction(first.cell_id)
    assert kept["predicted_peak_gib"] == pytest.approx(PROCESS_GIB + 1 / 1024)
    assert later.prediction(second.cell_id)["predicted_peak_gib"] == 7, "the first one stays"


def test_no_prediction_is_made_where_they_are_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, settings = planned(("sweep.baseline=null",), machine=THIS_LAPTOP)
    traced(plan, 1)
    admitted(plan, replace(settings, only="fits"), Console(quiet=True), THIS_LAPTOP, NO_STORE)
    shown = planned_store(THIS_LAPTOP.device)
    assert any(shown.is_predicted(cell_id) for cell_id in plan.entries)
    monkeypatch.setenv("VITSWEEP_PREDICT", "never")
    store = Store(tmp_path / "later").create()
    assert minutes(plan.runnable, store, THIS_LAPTOP) == {}
    for cell_id in plan.entries:
        store.adopt_prediction(cell_id, shown)
    assert not any(store.is_predicted(cell_id) for cell_id in plan.entries)


def test_cells_that_are_all_refused_are_named_with_their_reasons() -> None:
    plan, settings = planned(("precision=O1",), ("precision=O2",), machine=THIS_LAPTOP)
    traced(plan, 1)
    timed_before(plan.runnable[0].spec)
    plan = admitted(
        plan, replace(settings, max_gpu_hours=1e-9), Console(quiet=True), THIS_LAPTOP, NO_STORE
    )
    text = str(all_refused(plan))
    assert text.startswith("None of the cells")
    assert "2 cells: needs" in text or "`precision=O2`" in text
    assert text.count("sweep.max_gpu_hours=1e-09") == len(text.splitlines()) - 1


def _not_called(*_: Any, **__: Any) -> None:
    pytest.fail("nothing is to be predicted here")
