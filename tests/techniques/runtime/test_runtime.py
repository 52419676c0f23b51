"""Settings of a rank's process: what they set is in force, and what a machine lacks is named."""

import gc
import os
import re
from pathlib import Path

import pytest

from tests.cells import GPU_NODE, LAPTOP, THIS_LAPTOP, TINY, cell, composer, entry
from tests.ranks import on_ranks
from vitsweep.composition.grid import expand
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.rank_processes import context_for
from vitsweep.interpreters import variables
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.spec.cell_spec import flatten
from vitsweep.techniques.runtime import process
from vitsweep.training.timed_steps import garbage_collector_off
from vitsweep.training.trainer import ScheduledCollection
from vitsweep.world import World


def refusals(*overrides: str, gpu: bool = False) -> str:
    machine = GPU_NODE if gpu else THIS_LAPTOP
    return " ".join(entry(*TINY, *overrides, machine=machine).reasons)


def test_cores_are_shared_out_without_overlap_and_neighbours_stay_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {0: {0, 2, 4, 6}, 1: {1, 3, 5, 7}}
    monkeypatch.setattr(process, "numa_nodes", lambda: nodes)
    shares = [process.share_of_cores(set(range(8)), rank, 4) for rank in range(4)]
    assert shares == [{0, 2}, {4, 6}, {1, 3}, {5, 7}]
    assert process.share_of_cores({1, 4, 5, 6, 7}, 1, 2) == {1, 5}


def test_numa_nodes_are_read_as_linux_shows_them(tmp_path: Path) -> None:
    for node, cores in (("node0", "0-2,8"), ("node10", "3"), ("node2", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    assert process.numa_nodes(tmp_path) == {0: {0, 1, 2, 8}, 10: {3}}
    assert process.numa_nodes(tmp_path / "none") == {}


def test_a_rank_is_bound_to_its_cores() -> None:
    before = os.sched_getaffinity(0)
    spec = cell("runtime=bind_cores", "resources.ranks_per_node=1")
    try:
        spec.runtime.set_up(spec, 0)
        assert os.sched_getaffinity(0) == before
        one_of_many = cell("runtime=bind_cores", "resources.ranks_per_node=2")
        if len(before) > 1:
            one_of_many.runtime.set_up(one_of_many, 1)
            assert len(os.sched_getaffinity(0)) == len(before) // 2
        with pytest.raises(VitsweepError, match="rank 7"):
            one_of_many.runtime.set_up(one_of_many, 7)
    finally:
        os.sched_setaffinity(0, before)


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "numa_nodes", lambda: {0: {0, 1}})
    assert "`runtime=bind_cores`" in refusals("runtime=bind_numa")


def test_a_cluster_is_judged_by_its_nodes_and_not_by_the_machine_that_submits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "numa_nodes", lambda: {0: {0, 1}})
    planned = entry(*TINY, "runtime=bind_numa", machine=LAPTOP)
    assert not planned.reasons
    with pytest.raises(VitsweepError, match=r"several NUMA nodes.* 1"):
        planned.spec.runtime.set_up(planned.spec, 0)


def test_ranks_with_variables_of_their_own_are_new_processes() -> None:
    assert context_for(cell("runtime.variables={A:1}")).get_start_method() == "spawn"
    assert context_for(cell()).get_start_method() == "forkserver"
    assert context_for(cell("measurement.start=spawned")).get_start_method() == "spawn"
    refused = refusals("runtime.variables={A:1}", "measurement.start=forked")
    assert "`measurement.start=forked`" in refused
    assert "`runtime.variables`" in refused
    with variables({"VITSWEEP_A": "1", "HOME": "/nowhere"}):
        assert (os.environ["VITSWEEP_A"], os.environ["HOME"]) == ("1", "/nowhere")
    assert "VITSWEEP_A" not in os.environ
    assert os.environ["HOME"] != "/nowhere"


def test_cells_that_are_compared_start_alike() -> None:
    def starts(*typed: str) -> list[str]:
        plan = plan_of(expand([*TINY, *typed], composer()), LAPTOP, composer())
        entries = [*plan.entries.values()]
        assert all(e.tree["measurement"]["start"] == e.spec.measurement.start for e in entries)
        assert [e.cell_id for e in entries] == [e.spec.cell_id for e in entries]
        return [e.spec.measurement.start for e in entries]

    some = "runtime.variables=null,{A:1}"
    assert starts("precision=fp32,O1") == ["forked"] * 2
    assert starts(some, "precision=fp32,O1") == ["spawned"] * 4
    assert starts(some, "sweep.baseline=null") == ["forked", "spawned"]
    assert starts("precision=fp32,O1", "measurement.start=spawned") == ["spawned"] * 2


def test_variables_that_others_own_are_refused_by_name() -> None:
    for value, said in [
        ("{RANK:0,A:b}", "`RANK` cannot be set for a cell: the launcher sets it"),
        ("{slurm_job_id:1}", "`slurm_job_id` cannot"),
        ("{MASTER_ADDR:a}", "`MASTER_ADDR` cannot"),
        ("{LD_PRELOAD:a}", "`LD_PRELOAD` cannot be set for a cell: it loads code"),
        ("{PYTHONPATH:a}", "`PYTHONPATH` cannot"),
        ("{OMP_NUM_THREADS:2}", "`resources.threads_per_rank` sets it"),
        ("{CUDA_VISIBLE_DEVICES:0}", "`CUDA_VISIBLE_DEVICES` cannot"),
        ("{VITSWEEP_PREDICT:never}", "vitsweep sets it"),
        ("{HF_TOKEN:a}", "a secret would stand in every record"),
        ("{PGPASSWORD:a}", "a secret would stand in every record"),
        ("{AWS_ACCESS_KEY_ID:a}", "a secret would stand in every record"),
        ("{DB_PASS:a}", "a secret would stand in every record"),
        ("{A:1.0}", "put it into quotes, as in `A:'1.0'`"),
        ("{A:'b\tc'}", "must be one line of printable characters"),
        ("{}", "names no variable: use null"),
        ("a", "must be a section"),
    ]:
        with pytest.raises(BadValueError, match=re.escape(said)):
            cell(f"runtime.variables={value}")


def test_variables_are_part_of_the_identity_where_set() -> None:
    ids = [
        cell(*words).cell_id
        for words in (
            (),
            ("runtime.variables=null",),
            ("runtime.variables={NCCL_ALGO:Ring}",),
            ("runtime.variables={NCCL_ALGO:Tree}",),
            ("runtime.variables={A:1}",),
            ("runtime.variables={A:'1'}",),
        )
    ]
    assert ids[0] == ids[1]
    assert ids[4] == ids[5]
    assert len(set(ids)) == 4
    spec = cell("runtime.variables={NCCL_ALGO:Ring}")
    assert flatten(spec)["runtime.variables.NCCL_ALGO"] == "Ring"
    assert context_for(spec).get_start_method() == "spawn"


def test_ranks_that_something_else_started_without_the_variables_are_refused() -> None:
    spec = cell("runtime.variables={NCCL_ALGO:'Ring;Tree'}")
    with pytest.raises(VitsweepError, match="`NCCL_ALGO='Ring;Tree'`"):
        spec.runtime.set_up(spec, 0)
    with variables(spec.runtime.rank_environment):
        spec.runtime.set_up(spec, 0)


def test_garbage_is_collected_every_few_steps_and_not_between() -> None:
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    scheduled, never = ScheduledCollection(2), ScheduledCollection(0)
    gc.callbacks.append(note)
    try:
        with garbage_collector_off():
            collections.clear()
            for _ in range(5):
                scheduled.after_step()
                never.after_step()
            assert collections == [1, 1]
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def _num_left_out(world: World) -> int:
    return gc.get_freeze_count()


@pytest.mark.parametrize(("name", "left_out"), [("plain", True), ("gc_automatic", False)])
def test_collections_look_at_imported_modules_only_where_a_script_alone_would(
    name: str, left_out: bool, tmp_path: Path
) -> None:
    spec = cell(f"runtime={name}", "resources.ranks_per_node=1")
    [found] = on_ranks(1, _num_left_out, spec, folder=tmp_path)
    assert (found > 100_000) is left_out
