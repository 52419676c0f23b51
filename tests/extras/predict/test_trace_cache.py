"""Traces on disk: found again, replaced when damaged, written by several at once."""

import gzip
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.cells import GPU_NODE, cell, entry
from tests.extras.predict.test_step_trace import TRACE
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.extras.predict.trace_pool import TraceCache, trace_cells, traces_folder


def test_a_trace_is_found_again(tmp_path: Path) -> None:
    cache, each = TraceCache(tmp_path), cell()
    assert cache.get(cache.key(each)) is None
    cache.put(cache.key(each), TRACE)
    assert TraceCache(tmp_path).get(TraceCache(tmp_path).key(each)) == TRACE


@pytest.mark.parametrize(
    "damage",
    [b"", b"no gzip", gzip.compress(b"{", mtime=0), gzip.compress(b'{"a": 1}', mtime=0)],
    ids=["empty", "not compressed", "cut off", "other fields"],
)
def test_a_damaged_file_counts_as_missing_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    cache = TraceCache(tmp_path)
    cache.put("0" * 24, TRACE)
    [file] = tmp_path.rglob("*.json.gz")
    file.write_bytes(damage)
    assert cache.get("0" * 24) is None
    cache.put("0" * 24, TRACE)
    assert cache.get("0" * 24) == TRACE


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    cache, seen = TraceCache(tmp_path), []
    cache.put("1" * 24, TRACE)
    writers = [
        threading.Thread(target=lambda: [cache.put("1" * 24, TRACE) for _ in range(50)])
        for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.append(cache.get("1" * 24))
    for writer in writers:
        writer.join()
    assert all(found == TRACE for found in seen)
    assert len(list(tmp_path.rglob("*"))) == 2  # one folder with one file, nothing half written


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = TraceCache(tmp_path / "file" / "traces")
    cache.put("2" * 24, TRACE)
    assert cache.get("2" * 24) is None


def test_cells_of_equal_shape_share_a_trace_and_no_others_do(tmp_path: Path) -> None:
    cache, plain = TraceCache(tmp_path), cell()
    same = [
        replace(plain, seed=5),
        cell("optimizer.learning_rate=0.3"),
        cell("measurement.measured_steps=7"),
    ]
    other = [
        cell("batch.images_per_step=32"),
        cell("optimizer.clip_norm=1"),
        cell("model.depth=3"),
        cell("memory=recompute_blocks"),
        cell("resources.ranks_per_node=1", "sharding=none"),
        cell(machine=GPU_NODE),
    ]
    assert {cache.key(each) for each in same} == {cache.key(plain)}
    assert len({cache.key(each) for each in [plain, *other]}) == 1 + len(other)


def test_the_cache_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert traces_folder() == Path("/somewhere/vitsweep/traces")


def test_processes_that_trace_do_not_run_the_script_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setitem(sys.modules, "__main__", script)
    mine = entry("model=module", "model.target=tests.user_modules.raises").spec
    found = trace_cells({"mine": mine}, TraceCache(tmp_path / "traces"))
    assert "width must be even" in str(found["mine"])
    assert not (tmp_path / "ran").exists()


def test_a_cell_that_ends_the_process_that_traces_it_takes_no_other_with_it(tmp_path: Path) -> None:
    cells = {str(depth): cell(f"model.depth={depth}") for depth in (2, 3)}
    ends = entry("model=module", "model.target=tests.user_modules.ends_its_process").spec
    found = trace_cells({"ends": ends} | cells, TraceCache(tmp_path))
    assert "process" in str(found.pop("ends"))
    assert all(isinstance(trace, StepTrace) for trace in found.values())
    assert len(found) == 2


@pytest.mark.full
def test_processes_that_trace_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from tests.cells import cell; "
        "from vitsweep.extras.predict.trace_pool import TraceCache; "
        "from vitsweep.extras.predict.trace_pool import trace_cells; "
        "cells = {str(d): cell(f'model.depth={d}') for d in range(60, 100)}; "
        f"trace_cells(cells, TraceCache(Path({str(tmp_path)!r})))"
    )
    asking = subprocess.Popen([sys.executable, "-c", script])
    while not any(tmp_path.rglob("*.json.gz")):
        assert asking.poll() is None
        time.sleep(0.1)
    children = psutil.Process(asking.pid).children(recursive=True)
    tracing = [child for child in children if "forkserver" in " ".join(child.cmdline())]
    assert tracing
    asking.kill()
    asking.wait()
    _, alive = psutil.wait_procs(tracing, timeout=60)
    assert not alive
