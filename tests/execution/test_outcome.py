"""How the ranks of a run ended decides the status and the reason of its record."""

from vitsweep.execution.outcome import RankEnd, failure_of
from vitsweep.results.record import Status


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
