"""How often a verdict is false, and how often a delay is found, over simulated commands."""

import gc
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vitsweep.extras.judge import trial
from vitsweep.extras.judge.sides import Side
from vitsweep.extras.judge.trees import BASE, HEAD, Tree
from vitsweep.extras.judge.verdict import Answer, quality_of

RECORDED = [
    0.06,
    -0.115,
    0.213,
    0.16,
    0.115,
    0.045,
    0.085,
    0.557,
    -0.167,
    0.068,
    -0.032,
    -0.447,
    -0.021,
    -0.005,
    0.14,
    0.099,
    0.035,
    -0.328,
    0.488,
    0.214,
    0.042,
    -0.134,
    0.221,
    -0.041,
    -0.406,
    -0.138,
    0.045,
    0.078,
    -0.006,
    0.146,
    0.089,
    -0.07,
    0.272,
    -0.061,
    -0.068,
    -0.021,
    -0.141,
    -0.051,
]
"""log(base / head) of real blocks of the same code: 2 cores, on which 6 to 8 other processes worked."""
QUIETER = 0.1
"""Factor on them: about 2 % from block to block."""
BLOCKS = 40
"""That the budget of a simulated command is enough for; a block takes a second."""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """What earlier tests left, such as a loader's workers, would wait for a simulated clock."""
    gc.collect()


class Simulated(trial.Trial):
    """A trial whose blocks are drawn from recorded ones; the head's time is longer by `delay`."""

    random: np.random.Generator
    clock: list[float]
    log_delay: float
    noise: float

    def _block(self, *_: object) -> float:
        self.clock[0] += 1.0
        sign = self.random.choice([-1.0, 1.0])  # the recorded sides were the same code
        return float(self.noise * sign * self.random.choice(RECORDED)) - self.log_delay


def answers(
    number: int, delay: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> "Counter[str]":
    clock = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: clock[0])
    random, found = np.random.default_rng(1), Counter[str]()
    for _ in range(number):
        found[str(simulated(random, clock, delay, noise)._judged().answer)] += 1
    return found


def simulated(
    random: np.random.Generator, clock: list[float], delay: float, noise: float
) -> Simulated:
    trees = [Tree(side=s, root=Path(s), label=s, source=Path(s)) for s in (BASE, HEAD)]
    sides = [Silent(tree=t, python="", paths=(), folder=Path(), timeout=1.0) for t in trees]
    held = Simulated(
        base=sides[0],
        head=sides[1],
        request={"script": "", "quality": "none"},
        ranks=1,
        width=0.03,
        deadline=clock[0] + BLOCKS,
        folder=Path(),
        facts={},
        flops_per_second=0.0,
        say=lambda text: None,
    )
    held.random, held.clock, held.noise = random, clock, noise
    held.log_delay = math.log1p(delay)
    held.step_seconds[HEAD].append(1.0)
    held._probe = lambda: False  # type: ignore[method-assign]
    return held


class Silent(Side):
    def start(self) -> None:
        """Nothing is started."""


def is_false(found: "Counter[str]") -> int:
    return found["slower"] + found["faster"]


@pytest.mark.parametrize("noise", [1.0, QUIETER])
def test_the_same_code_is_seldom_called_slower_or_faster(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_false(answers(60, 0.0, noise, monkeypatch)) <= 6


@pytest.mark.full
@pytest.mark.parametrize("noise", [1.0, QUIETER])
def test_of_1000_verdicts_on_the_same_code_at_most_55_are_false(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_false(answers(1000, 0.0, noise, monkeypatch)) <= 55


def test_a_delay_is_found_where_blocks_differ_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(40, 0.1, QUIETER, monkeypatch)["slower"] >= 36
    assert answers(40, 0.1, 1.0, monkeypatch)["faster"] <= 2


@pytest.mark.parametrize(("delay", "sign"), [(0.1, "slower"), (-0.1, "faster")])
def test_a_difference_counts_only_where_fresh_processes_repeat_it(
    delay: float, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: clock[0])
    held = simulated(np.random.default_rng(1), clock, delay, 0.01)
    before, starts = held._block, list[str]()

    def block(*arguments: object) -> float:
        """In the first processes the head is slower or faster, whatever its code."""
        return before() + (math.log1p(delay) if starts else 0.0)

    held._block = block  # type: ignore[method-assign]
    held.base.start = lambda: starts.append(BASE)  # type: ignore[method-assign]
    held.head.start = lambda: starts.append(HEAD)  # type: ignore[method-assign]
    verdict = held._judged()
    assert starts == [BASE, HEAD]
    assert verdict.speed is not None
    assert str(verdict.speed.claim) == sign
    assert verdict.answer is Answer.no_difference
    assert verdict.reason == f"a first sign of a {sign} head did not recur"


def test_a_worse_quality_is_worse_whatever_the_speed() -> None:
    loss = quality_of("loss", [0.1, 0.11, 0.12, 0.1, 0.11])
    assert loss.is_worse
    assert not quality_of("accuracy", [0.1, 0.11, 0.12, 0.1, 0.11]).is_worse
    assert quality_of("accuracy", [-0.1, -0.11, -0.12, -0.1, -0.11]).is_worse
    assert not quality_of("loss", [0.5, 0.5]).is_worse
