"""What a command that submits says of itself, and what its jobs ask Slurm for."""

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.cells import GPU_NODE, TINY, cell, entry
from tests.launchers.slurm.fabricated import SCRIPT
from tests.launchers.slurm.test_packing import settings
from tests.refusals import require
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.commands import SlurmJob
from vitsweep.launchers.slurm.state.poll import poll
from vitsweep.launchers.slurm.submit import launch
from vitsweep.launchers.slurm.submit.settings import Request, request_of
from vitsweep.planning.sweep_plan import SweepPlan


def test_the_result_says_whether_jobs_go_on(store, monkeypatch):
    monkeypatch.setattr(launch, "require_slurm", lambda: None)
    sweep = SimpleNamespace(store=store, plan="plan")
    monkeypatch.setattr(launch, "prepared", lambda request: nullcontext(sweep))
    monkeypatch.setattr(launch.sweeps, "held", lambda store, console: nullcontext())
    request: Any = SimpleNamespace(console=Console(file=io.StringIO()))
    for arrays, wait, goes_on, submitted, interrupted in (
        (["a"], False, True, True, False),
        ([], False, True, False, False),
        (["a"], True, True, True, True),
        (["a"], True, False, False, False),
        ([], True, True, False, False),
    ):
        monkeypatch.setattr(launch, "_submit_missing", lambda *_, arrays=arrays: arrays)
        monkeypatch.setattr(launch, "watch", lambda *_, goes_on=goes_on: not goes_on)
        with launch.launch(request, settings(wait=wait)) as result:
            assert (result.submitted, result.interrupted) == (submitted, interrupted)
            assert (result.store, result.plan) == (store, "plan")


def test_a_command_says_with_which_other_settings_live_jobs_run(store, slurm):
    earlier = [
        entry(f"sharding={name}", "task=train", "task.keep=none") for name in ("ddp", "fsdp")
    ]
    runs = [{"cell_id": e.cell_id, "run_id": f"b-{e.cell_id}"} for e in earlier]
    work = {
        "blocks": [{"name": "b", "runs": runs}],
        "cells": {e.cell_id: e.spec.of_command for e in earlier},
    }
    (store.root / "jobs" / "a" / "tasks.jsonl").write_text(json.dumps(work) + "\n")
    slurm["7_0"] = SlurmJob(state="PENDING", script=SCRIPT)

    def said(*typed: str) -> str:
        plan = SweepPlan({e.cell_id: e for e in [entry("task=train", *typed)]})
        return launch.typed_otherwise(poll(store), plan, store)

    assert said("task.keep=none", "measurement.blocks=9") == "", "further jobs do these"
    assert said("seed=9") == "", "another cell"
    require(said(), f"1 `task.keep=none` `vitsweep cancel {store.root}`")
    assert "checkpoint_minutes" not in said()
    slurm.clear()
    assert said() == "", "no job is live"


def test_a_job_asks_for_what_its_cells_need():
    ranks = ("resources.nodes=2", "resources.ranks_per_node=2", "resources.threads_per_rank=1")
    on_cpus = cell(*ranks, "measurement.timeout_min=12.5")
    given = settings(minutes_per_job=30)
    plain = Request(nodes=2, ranks_per_node=2, cpus=2, gpus=0, memory_gib=None, minutes=43)
    assert request_of(on_cpus, given) == plain
    assert request_of(on_cpus, settings(timeout_min=7)).minutes == 7
    assert request_of(on_cpus, settings(mem_gb=3)).memory_gib == 3
    budget = cell(*ranks, "resources.memory_gib_per_rank=2")
    for mem_gb, gib in ((None, 6.0), (5, 6.0), (6.5, 6.5)):
        assert request_of(budget, settings(mem_gb=mem_gb)).memory_gib == gib
    on_gpus = cell(*TINY, "resources.ranks_per_node=2", machine=GPU_NODE)
    assert request_of(on_gpus, given).gpus == 2
    many = replace(on_cpus, resources=replace(on_cpus.resources, threads_per_rank=64))
    assert request_of(many, given).cpus == on_cpus.resources.cores_per_node


def test_a_request_becomes_options_of_sbatch():
    request = Request(nodes=2, ranks_per_node=4, cpus=8, gpus=4, memory_gib=2.0001, minutes=43)
    plain = {"nodes": 2, "ntasks_per_node": 1, "cpus_per_task": 8, "mem": "2049MB", "time": 43}
    assert request.name == "n2x4"
    for given, gpus in (
        ({}, {"gpus_per_node": 4}),
        ({"gpu_type": "h100"}, {"gpus_per_node": "h100:4"}),
        ({"gres": "gpu:4"}, {}),
    ):
        assert request.sbatch(settings(**given)) == plain | gpus
    small = replace(request, gpus=0, memory_gib=None).sbatch(settings(gpu_type="h100"))
    assert small == {k: v for k, v in plain.items() if k != "mem"}


def test_a_wrong_time_limit_of_a_job_suggests_no_other_key() -> None:
    with pytest.raises(BadValueError) as said:
        settings(timeout_min="soon")
    assert str(said.value) == "`hydra.launcher.timeout_min=soon`: must be a whole number or `auto`."


def test_less_work_gets_a_shorter_limit_where_none_was_typed():
    request = Request(nodes=1, ranks_per_node=1, cpus=1, gpus=0, memory_gib=None, minutes=43)
    given = settings(minutes_per_job=30)
    for minutes, limit in (
        (0.0, 13),
        (10.0, 23),
        (10.5, 32 - 8),
        (29.5, 43),
        (30.0, 43),
        (50.0, 43),
    ):
        assert request.for_work_of(minutes, given).minutes == limit, minutes
    typed = settings(minutes_per_job=30, timeout_min=43)
    assert request.for_work_of(10.0, typed) == request


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_cell_alone_that_is_not_measured_is_an_error(store, monkeypatch, is_measured):
    from tests.builders import run
    from tests.cells import LAPTOP, composer
    from vitsweep.composition.sweep_settings import sweep_settings
    from vitsweep.errors import VitsweepError
    from vitsweep.launchers import local
    from vitsweep.planning.sweep_plan import plan_cell
    from vitsweep.results.record import Status

    asked = composer().compose([*TINY, "sweep.baseline=null"])
    cell_id = plan_cell(asked, LAPTOP).cell_id
    monkeypatch.setattr(local.Machine, "here", lambda: LAPTOP)
    monkeypatch.setattr(local, "open_store", lambda settings: store)
    monkeypatch.setattr(local, "frozen", lambda store, request: SimpleNamespace(
        store=store, plan=request.plan))  # fmt: skip
    ends = [Status.timed_out, Status.measured if is_measured else Status.failed]

    def runs(sweep: Any, request: Any, *how: Any) -> None:
        for block, status in enumerate(ends):
            store.save_run(run(cell_id, f"b{block}", 9.0, status, f"reason {block}"))

    monkeypatch.setattr(local, "_run", runs)
    settings_of_sweep = sweep_settings(asked.tree)
    if is_measured:
        local.run_unlocked(asked, settings_of_sweep, composer())
        return
    with pytest.raises(VitsweepError, match=f"{cell_id} .*reason 1") as refused:
        local.run_unlocked(asked, settings_of_sweep, composer())
    assert "reason 0" not in str(refused.value)
