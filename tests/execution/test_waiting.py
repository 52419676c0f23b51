"""When the supervisor stops waiting for the ranks of a run: by a clock that the test sets."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from vitsweep.execution import rank_processes
from vitsweep.execution.rank_processes import wait_for_ranks


@dataclass
class Scripted:
    """Ranks of which one fails at a time and all end at another; waiting moves the clock."""

    fails_at: float = 1e9
    ends_at: float = 1e9
    now: float = 100.0
    waits: list[float] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.now < 100 + self.ends_at

    @property
    def failed(self) -> bool:
        return self.now >= 100 + self.fails_at

    def wait(self, seconds: float) -> None:
        self.waits.append(round(seconds, 9))
        self.now += seconds


def waited(
    monkeypatch: pytest.MonkeyPatch, seconds: float, **script: float
) -> tuple[bool, Any, int]:
    """Whether it ended in time, its ranks, and how often `on_wait` was called."""
    ranks, calls = Scripted(**script), list[int]()
    monkeypatch.setattr(rank_processes.time, "monotonic", lambda: ranks.now)
    found = wait_for_ranks(ranks, seconds, 2.0, lambda: calls.append(1))  # type: ignore[arg-type]
    return found, ranks, len(calls)


def test_ranks_that_end_are_waited_for_in_fifths_of_a_second(monkeypatch) -> None:
    in_time, ranks, calls = waited(monkeypatch, 60.0, ends_at=1.0)
    assert (in_time, calls, ranks.waits) == (True, 5, [0.2] * 5)
    assert waited(monkeypatch, 60.0, ends_at=0.0)[2] == 0


def test_the_time_limit_ends_it(monkeypatch) -> None:
    in_time, ranks, _ = waited(monkeypatch, 0.5)
    assert not in_time
    assert ranks.waits == [0.2, 0.2, 0.1, 0.01], "the last look comes just after the limit"


def test_after_a_failure_the_others_have_their_grace_alone(monkeypatch) -> None:
    in_time, ranks, _ = waited(monkeypatch, 60.0, fails_at=1.0)
    assert in_time
    assert ranks.now - 100 == pytest.approx(3.2, abs=0.21)
    in_time, ranks, _ = waited(monkeypatch, 60.0, fails_at=1.0, ends_at=2.0)
    assert in_time
    assert ranks.now - 100 == pytest.approx(2.0, abs=0.21)
    in_time, ranks, _ = waited(monkeypatch, 2.0, fails_at=1.0)
    assert not in_time, "the time limit comes before the end of the grace period"
