"""How cells become jobs, without a cluster."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import of_present_code, run
from tests.cells import TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.commands import gpu_types_in, gpus_in
from vitsweep.launchers.slurm.node import signals
from vitsweep.launchers.slurm.node.signals import Signals
from vitsweep.launchers.slurm.submit.sbatch import (
    PlannedJob,
    pack,
    paired,
    parameters,
    run_minutes,
)
from vitsweep.launchers.slurm.submit.settings import SlurmSettings, groups, settings_of
from vitsweep.planning.freeze import code_folder
from vitsweep.planning.pending import resume_state
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.store import Store
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine

MACHINE = Machine(device="cpu", cores_per_node=4, devices_per_node=0)


def settings(**given: object) -> SlurmSettings:
    import yaml

    fields = yaml.safe_load((conf_dir() / "hydra/launcher/slurm.yaml").read_text())
    fields.pop("_target_")
    return settings_of(fields | given)


def plan(*overrides: str) -> SweepPlan:
    return plan_of(expand([*TINY, *overrides], composer()), MACHINE, composer())


def packed(cells: SweepPlan, blocks: int, **given: object) -> list[PlannedJob]:
    missing = {e.cell_id: blocks for e in cells.runnable if not e.is_added_baseline}
    minutes = dict.fromkeys(cells.entries, 1.0)
    found = pack(cells, missing, minutes, (), settings(**given), 8)
    return [job for jobs in found.values() for job in jobs]


def test_cells_with_different_nodes_never_share_an_array():
    cells = plan("resources.nodes=1,2,4", "sharding=ddp,fsdp")
    found = groups(cells.runnable, settings())
    assert [(request.nodes, len(entries)) for request, entries in found.items()] == [
        (1, 2),
        (2, 2),
        (4, 2),
    ]


def test_a_memory_budget_is_requested_from_slurm():
    [request] = groups(plan("resources.memory_gib_per_rank=2").runnable, settings())
    assert request.sbatch(settings())["mem"] == "6144MB"  # two ranks, each with its interpreter


def test_every_job_holds_the_baseline_of_its_cells():
    cells = plan("precision=O1,bf16", "sharding=fsdp,zero2")
    jobs = packed(cells, blocks=3, cells_per_job=1)
    baseline = next(iter(cells.baselines.values()))
    assert len(jobs) == 4
    for job in jobs:
        assert len(job.blocks) == 3
        assert all(baseline in {e.cell_id for e in block.entries} for block in job.blocks)


IN_OTHER_JOBS = ("resources.nodes=2", "sweep.match=[model]")
"""A cell that asks for other resources than its baseline."""


def test_a_baseline_that_runs_in_other_jobs_is_counted_by_its_own_runs():
    cells = plan(*IN_OTHER_JOBS)
    cell, baseline = cells.entries
    sweep = sweep_settings(composer().compose().tree)
    runs = [run(cell, f"b{number}", 100) for number in range(5)]
    runs += [run(baseline, f"c{number}", 100) for number in range(4)]
    runs = of_present_code(cells, runs)
    assert resume_state(cells, runs, sweep, "2.13.0").missing_blocks == {cell: 5}, "no pairs at all"
    counted = paired(cells, settings())
    assert resume_state(counted, runs, sweep, "2.13.0").missing_blocks == {baseline: 1}


def test_a_baseline_that_runs_next_to_its_cells_is_not_counted_alone():
    cells = plan("sharding=fsdp")
    assert paired(cells, settings()) == cells


@pytest.mark.parametrize(("minutes_per_job", "jobs"), [(5, 8), (1000, 1), (18, 2)])
def test_jobs_hold_as_many_cells_as_fit_into_their_minutes(minutes_per_job, jobs):
    cells = plan("precision=O1", "sharding=fsdp", "seed=range(0,8)", "sweep.match=[model]")
    assert len(packed(cells, blocks=2, minutes_per_job=minutes_per_job)) == jobs


def test_longest_jobs_come_first_and_known_minutes_shorten_the_time_limit():
    cells = plan("seed=1,2,3", "sweep.baseline=null", "measurement.timeout_min=10")
    missing = dict.fromkeys(cells.entries, 2)
    minutes = dict(zip(cells.entries, (1.0, 3.0, 2.0), strict=True))
    given = settings(cells_per_job=1, minutes_per_job=30)
    [(assumed, jobs)] = pack(cells, missing, minutes, (), given, 8).items()
    assert [job.minutes for job in jobs] == [6, 4, 2]
    [known] = pack(cells, missing, minutes, minutes, given, 8)
    assert (assumed.minutes, known.minutes) == (30 + 10, 6 * 1.5 + 5 + 10)
    typed = settings(cells_per_job=1, timeout_min=77)
    [typed_limit] = pack(cells, missing, minutes, minutes, typed, 8)
    assert typed_limit.minutes == 77


def test_a_run_takes_what_was_measured_else_predicted_else_assumed():
    cells = plan("seed=1,2,3", "sweep.baseline=null")
    a, b, c = cells.entries
    assert run_minutes(cells, [], {}, 2.0)[0] == {a: 2.0, b: 2.0, c: 2.0}
    found = run_minutes(cells, [], {a: 1.0, b: 4.0}, 2.0)
    assert found == ({a: 1.0, b: 4.0, c: 2.0}, {a, b})
    measured = run(a, environment={"run_seconds": 90.0})
    found = run_minutes(cells, [measured], {a: 1.0, b: 4.0}, 2.0)
    assert found[0] == {a: 1.5, b: 4.0, c: 1.5}


@pytest.mark.parametrize(
    ("gres", "count", "types"),
    [
        ("(null)", 0, set()),
        ("gpu:8", 8, {""}),
        ("gpu:h100:4(S:0-1)", 4, {"h100"}),
        ("nvme:1,gpu:a100:2,gpu:a40:1", 3, {"a100", "a40"}),
        ("gpu:nvidia_a100-sxm4-80gb:8", 8, {"nvidia_a100-sxm4-80gb"}),
    ],
)
def test_gpus_of_a_node_are_read_from_its_generic_resources(gres, count, types):
    assert gpus_in(gres) == count
    assert gpu_types_in(gres) == types


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("nodes", 2, "hydra.launcher.nodes"),
        ("cells_per_job", "many", "hydra.launcher.cells_per_job=many"),
        ("partition", "a\nb", "control character"),
        ("qos", "a\\b", "backslash"),
        ("setup", ["export A=1\nrm x"], "control character"),
        ("timeout_mins", 5, "hydra.launcher.timeout_mins"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, message):
    with pytest.raises(BadValueError, match=message):
        settings(**{field: value})


def test_settings_become_options_of_sbatch():
    [(request, _)] = groups(plan().runnable, settings()).items()
    wanted = settings(partition="p", additional_parameters={"x-y": 1})
    options = parameters("s", request, wanted, Path("/co de"))
    assert (options["partition"], options["exclusive"]) == ("p", True)
    assert options["additional_parameters"] == {"requeue": True, "x-y": 1}
    assert options["setup"][0].startswith("export PYTHONPATH='/co de'$")
    assert "--cpus-per-task=4" in options["srun_args"]


def test_the_time_limit_is_distinguished_from_preemption_by_a_clock_that_nobody_sets(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    monkeypatch.setattr("vitsweep.launchers.slurm.node.signals.slurm_output", lambda *command: None)
    late = Signals(
        "1", "1_0", started_at=time.monotonic() - 3000, limit_s=3060, delay_s=30, received="SIGUSR2"
    )
    early = replace(late, started_at=time.monotonic())
    cancelled = replace(early, received="SIGTERM")
    assert [s.ending().cause for s in (late, early, cancelled)] == [
        "time limit",
        "preempted",
        "cancelled",
    ]


@pytest.mark.parametrize(
    ("shown", "cause", "requeue"),
    [
        ("JobState=COMPLETING Restarts=1 PreemptTime=None", "requeued", True),
        ("JobState=COMPLETING Restarts=0 PreemptTime=None", "cancelled", False),
        ("JobState=RUNNING Restarts=0 PreemptTime=2026-01-01T00:00:00", "preempted", True),
    ],
)
def test_a_requeue_is_distinguished_from_a_cancellation_by_the_number_of_restarts(
    monkeypatch, shown, cause, requeue
):
    monkeypatch.setattr("vitsweep.launchers.slurm.node.signals.slurm_output", lambda *args: shown)
    received = Signals(
        "1",
        "1_0",
        started_at=time.monotonic(),
        limit_s=3600,
        delay_s=30,
        received="SIGTERM",
        restart=0,
    )
    ending = received.ending()
    assert (ending.cause, ending.requeue) == (cause, requeue)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [("KillWait                = 60 sec\n", 54.5), ("KillWait = 6 sec", 5.5 * 2 / 3), ("", 24.5)],
)
def test_a_training_may_save_itself_until_slurm_kills_the_job(monkeypatch, config, seconds):
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    said = {key.strip(): value for key, _, value in [config.partition("=")]}
    monkeypatch.setattr(signals, "controller_settings", lambda: said)
    shown = "JobState=CANCELLED Restarts=0 PreemptTime=None"
    monkeypatch.setattr(signals, "slurm_output", lambda *words: shown)
    received = Signals(
        "1", "1_0", started_at=time.monotonic(), limit_s=3600, delay_s=30, received="SIGTERM",
        received_at=4999.5,
    )  # fmt: skip
    ending = received.ending()
    assert (ending.cause, ending.requeue) == ("cancelled", False)
    assert ending.seconds_to_save == pytest.approx(seconds)
    running = "JobState=RUNNING Restarts=0 PreemptTime=None"
    monkeypatch.setattr(signals, "SECONDS_UNTIL_STATE_CHANGES", -1.0)
    monkeypatch.setattr(signals, "slurm_output", lambda *words: running)
    for limit_s in (0, 60):  # it is over, or was longer when the job was submitted
        ending = replace(received, limit_s=limit_s, received_at=4999.5).ending()
        assert (ending.cause, ending.requeue) == ("time limit", True)
        assert ending.seconds_to_save == pytest.approx(seconds)


def test_a_snapshot_keeps_the_code_of_the_command(tmp_path):
    store = Store(tmp_path)
    copy = code_folder(store, snapshot=True)
    assert (copy / "vitsweep/launchers/slurm/node/agent.py").is_file()
    assert code_folder(store, snapshot=True) == copy
    assert (code_folder(store, snapshot=False) / "vitsweep").is_dir()
    for path, text in (("vitsweep/cell.py", "changed"), ("vitsweep/more.py", "")):
        (copy / path).write_text(text)
        assert code_folder(store, snapshot=True) != copy
        assert (code_folder(store, snapshot=True) / "vitsweep/cell.py").read_text() != "changed"
