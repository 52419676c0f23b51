"""How the ranks of a run ended decides the status and the reason of its record."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import run
from tests.cells import cell
from vitsweep.execution import outcome
from vitsweep.execution.outcome import (
    NO_INSTRUMENTS,
    RECORD_DRAFT,
    RankEnd,
    RunFailure,
    _essence,
    _own_words,
    classify,
    cut_logs,
    failure_of,
    publish,
    remove_working_files,
)
from vitsweep.execution.run_request import RunRequest
from vitsweep.results.record import Status
from vitsweep.results.store import Store


def reported(rank: int, reason: str, time: float = 0.0, status: str = "failed") -> RankEnd:
    failure = {"rank": rank, "status": status, "reason": reason, "time": time}
    return RankEnd(rank=rank, exit_code=1, failure=failure)


def ended(rank: int, exit_code: int | None, lost: str = "") -> RankEnd:
    return RankEnd(rank=rank, exit_code=exit_code, lost=lost)


def test_all_ranks_with_exit_code_0_are_no_failure() -> None:
    assert failure_of([ended(0, 0), ended(1, 0)], in_time=True, timeout_min=1) is None


def test_the_first_rank_that_failed_by_itself_gives_the_reason() -> None:
    for ends, status, rank, reason in [
        ([reported(0, "Connection reset by peer", 1.0), ended(1, -9)], "killed", 1, "SIGKILL"),
        ([reported(0, "Broken pipe", 1.0), reported(1, "a bug", 2.0)], "failed", 1, "a bug"),
        ([reported(0, "late", 2.0), reported(1, "early", 1.0)], "failed", 1, "early"),
        ([reported(0, "Broken pipe", 1.0), reported(1, "Broken pipe", 2.0)], "failed", 0, "pipe"),
        ([reported(0, "no memory", status="out_of_memory"), ended(1, -15)], "out_of_memory", 0, ""),
        ([reported(0, "Connection closed by peer"), ended(1, 0)], "failed", 1, "code 0 before"),
        ([ended(0, 0), ended(1, 9)], "failed", 1, "exit code 9"),
        ([ended(0, 1), ended(1, 74)], "killed", 1, "the disk is full"),
        ([ended(0, 0), ended(1, -11)], "failed", 1, "SIGSEGV"),
        ([ended(0, 0), ended(1, None, "Node n2 is gone.")], "killed", 1, "n2 is gone"),
        ([ended(0, 0), ended(1, None)], "failed", None, "did not end"),
    ]:
        found = failure_of(ends, in_time=True, timeout_min=1)
        assert found is not None
        assert (found.status, found.rank) == (status, rank)
        assert reason in found.reason


def test_a_run_beyond_its_time_limit_is_timed_out_whatever_its_ranks_did() -> None:
    found = failure_of([ended(0, -9)], in_time=False, timeout_min=1.5)
    assert found is not None
    assert found.status == Status.timed_out
    assert "measurement.timeout_min=1.5" in found.reason


def test_a_signal_from_outside_kills_and_one_of_its_own_fails() -> None:
    for code, status in (
        (-9, "killed"),
        (-15, "killed"),
        (-1, "killed"),
        (-6, "failed"),
        (3, "failed"),
    ):
        found = failure_of([ended(0, code)], in_time=True, timeout_min=1)
        assert found is not None
        assert (found.status, found.rank) == (status, 0)
        assert ("memory" in found.reason) == (code == -9)


def test_peak_memory_of_the_rank_that_failed_is_kept() -> None:
    end = reported(1, "no memory")
    assert end.failure is not None
    end.failure["peak"] = {"peak_rss_gib": 2.0}
    found = failure_of([end, ended(0, -15)], in_time=True, timeout_min=1)
    assert found == RunFailure(Status.failed, "no memory", 1, {"peak_rss_gib": 2.0})
    end.failure["peak"] = None
    found = failure_of([end], in_time=True, timeout_min=1)
    assert found is not None
    assert found.peak == {}


@pytest.mark.parametrize("instruments", [True, False])
@pytest.mark.parametrize("left", ["nothing", "damage", "another run's", "its own"])
def test_the_record_is_what_rank_0_left_or_says_why_there_is_none(
    tmp_path: Path, left: str, instruments: bool
) -> None:
    """A failure under the instruments takes their columns alone."""
    request = RunRequest(sweep_folder=tmp_path, cell_id="c", run_id="b-1", block="b", position=2)
    request.folder.mkdir(parents=True)
    told = {NO_INSTRUMENTS: "The run ended after the timed steps."} if instruments else {}
    record = replace(run("c", block="b", environment=told), run_id="b-1")
    text = {
        "damage": "{",
        "another run's": replace(record, run_id="b-2").to_json(),
        "its own": record.to_json(),
    }.get(left)
    if text:
        (request.folder / RECORD_DRAFT).write_text(text)
    failure = RunFailure(Status.killed, "Rank 1 died.", 1, {"peak_rss_gib": 2.0})
    found = publish(request, cell(), failure)
    assert [each.run_id for each in Store(tmp_path).runs()] == ["b-1"]
    if left == "its own" and instruments:
        assert found.status == Status.measured
        assert "Rank 1 died." in found.environment[NO_INSTRUMENTS]
        assert found.metrics["images_per_second"] == 100.0
        return
    assert (found.status, found.reason, found.failed_rank) == (Status.killed, "Rank 1 died.", 1)
    assert (found.position, found.metrics) == (2, {"peak_rss_gib": 2.0})
    assert found.environment["device_type"] == "cpu"


def test_without_a_failure_the_record_of_rank_0_counts_or_its_lack_does(tmp_path: Path) -> None:
    for name in ("b-1", "b-2"):
        request = RunRequest(sweep_folder=tmp_path, cell_id="c", run_id=name, block="b", position=0)
        request.folder.mkdir(parents=True)
        if name == "b-1":
            record = replace(run("c", block="b"), run_id=name)
            (request.folder / RECORD_DRAFT).write_text(record.to_json())
        found = publish(request, cell(), None)
        expected = (Status.measured, None) if name == "b-1" else (Status.failed, 0)
        assert (found.status, found.failed_rank) == expected


def test_what_a_measured_run_leaves_is_its_words_alone(tmp_path: Path) -> None:
    request = RunRequest(sweep_folder=tmp_path, cell_id="c", run_id="b-1", block="b", position=0)
    remove_working_files(request)
    for kept in (["rank1.log"], []):
        request.folder.mkdir(parents=True, exist_ok=True)
        (request.folder / RECORD_DRAFT).write_text("{}")
        (request.folder / "rank0.log").touch()
        (request.folder / "rank1.log").write_text("a warning" if kept else "")
        remove_working_files(request)
        there = sorted(p.name for p in request.folder.iterdir()) if request.folder.exists() else []
        assert there == kept


def test_long_logs_keep_their_first_and_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "LOG_PART_BYTES", 4)
    kept, log = tmp_path / "rank0.log", tmp_path / "rank12.log"
    kept.write_bytes(b"12345678")
    log.write_bytes(b"1234midst5678")
    (tmp_path / "elsewhere").write_bytes(b"1234midst5678")
    (tmp_path / "rank2.log").symlink_to("elsewhere")
    cut_logs(tmp_path)
    first, said, last = log.read_bytes().split(b"\n")
    assert (first, last) == (b"1234", b"5678")
    assert b"5 bytes" in said
    assert kept.read_bytes() == b"12345678"
    assert (tmp_path / "elsewhere").read_bytes() == b"1234midst5678"


def test_a_message_is_its_first_sentence_of_at_most_500_letters() -> None:
    for text, found in (
        ("one", "one"),
        ("one.\ntwo", "one."),
        ("one by \ntwo three.\nmore", "one by two three."),
        ("one,\nTwo", "one,"),
        ("NCCL error\nmiddle\nlast", "NCCL error middle last"),
        ("NCCL error.\nMiddle\nlast", "NCCL error. last"),
        ("error\nNCCL", "error"),
        (501 * "a", 500 * "a"),
    ):
        assert _essence(text) == found


def test_an_exception_of_a_loaders_worker_is_reported_in_its_own_words() -> None:
    frames = 'Original Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\n'
    worker = RuntimeError(
        f"Caught KeyError in DataLoader worker process 0.\n{frames}KeyError: 'a'\nitem 3"
    )
    assert _own_words(worker) == ("KeyError", "'a'", " item 3")
    plain = ValueError(" wrong ")
    assert _own_words(plain) == ("ValueError", "wrong", "")
    plain.add_note("item 1")
    plain.add_note("item 2")
    assert _own_words(plain) == ("ValueError", "wrong", " item 2")
    assert _own_words(KeyError()) == ("KeyError", "KeyError", "")


def test_some_errors_mean_a_lack_of_memory_under_a_limit_alone(monkeypatch) -> None:
    for limit, status in ((resource.RLIM_INFINITY, "failed"), (2**30, "out_of_memory")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        for text in ("could not create a primitive", "Resource temporarily unavailable"):
            assert classify(RuntimeError(text))[0] == status
        assert classify(RuntimeError("out of memory"))[0] == "out_of_memory"
        assert classify(RuntimeError("something else"))[0] == "failed"
