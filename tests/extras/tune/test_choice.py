"""Simulated block times: the fastest is found, nothing is claimed falsely, and the slow ones cost little."""

from collections.abc import Sequence

import numpy as np
import pytest

from vitsweep.extras.tune.choice import Block, between, next_turn

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
MOST_BLOCKS = 2000


def searched(
    speeds: Sequence[float], spread: float, random: np.random.Generator, most: int = MOST_BLOCKS
) -> tuple[str, int]:
    """Return which setting is shown to be the fastest, "" for none, and the number of blocks it took.

    Args:
        speeds: of each setting.
        spread: standard deviation of the log of a block's time; a turn is slower or faster as a whole, too.
        random: draws the times.
        most: blocks after which the search ends.
    """
    settings, out, turn = NAMES[: len(speeds)], dict[str, str](), 0
    blocks: list[Block] = []
    while len(blocks) < most:
        left, more = next_turn(blocks, settings, out)
        out |= more
        if len(left) == 1:
            return left[0], len(blocks)
        turn, level = turn + 1, random.normal(0, 0.2)
        for name in left:
            noise = float(np.exp(level + random.normal(0, spread)))
            blocks.append(Block(turn, name, noise / speeds[settings.index(name)]))
    return "", len(blocks)


def test_a_setting_that_is_twice_as_slow_has_few_blocks_and_the_first_is_no_exception() -> None:
    random = np.random.default_rng(0)
    for speeds in ([0.5, 1, 0.9, 0.5], [1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]):
        found = [searched(speeds, 0.01, random) for _ in range(5)]
        assert {name for name, _ in found} == {NAMES[speeds.index(1)]}
        assert max(blocks for _, blocks in found) <= 40


def test_halving_drops_the_slower_half_after_one_turn() -> None:
    speeds = dict(zip(NAMES, (1.0, 0.99, 0.9, 1.1, 0.6, 0.5, 0.4, 0.3), strict=True))
    blocks = [Block(1, name, 1 / speed) for name, speed in speeds.items()]
    left, out = next_turn(blocks, NAMES, {})
    assert left == ["d", "a", "b", "c", "e"]
    assert set(out) == {"f", "g", "h"}
    assert "slower half after 1 turn" in out["h"]


def test_a_setting_without_a_block_in_a_turn_is_asked_again_and_one_that_is_out_is_not() -> None:
    assert next_turn([], NAMES[:3], {"b": "failed"}) == (["a", "c"], {})
    blocks = [Block(1, "a", 1.0), Block(1, "b", 1.0), Block(2, "a", 1.0)]
    left, out = next_turn(blocks, NAMES[:3], {"b": "failed"})
    assert (sorted(left), out) == (["a", "c"], {})
    assert between(blocks, "a", "b").num_blocks == 1


@pytest.mark.parametrize("repetitions", [20, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("spread", [0.03, 0.05])
def test_the_fastest_of_four_is_found_and_among_equals_none(
    spread: float, repetitions: int
) -> None:
    random = np.random.default_rng(1)
    found = [searched([1, 1, 1.05, 1], spread, random) for _ in range(repetitions)]
    names, blocks = zip(*found, strict=True)
    within = sum(name == "c" and number <= 100 for name, number in found)
    print(
        f"spread {spread}: {names.count('c')} of {repetitions} found, {within} within 100 blocks, "
    )
    print(f"blocks {np.percentile(blocks, [50, 90, 95, 100])}")
    assert names.count("c") >= 0.95 * repetitions
    for speeds in ([1, 1, 1, 1], [1.05, 1, 1.05, 1]):
        equal = [searched(speeds, spread, random, 100)[0] for _ in range(repetitions)]
        claimed = repetitions - equal.count("")
        print(f"{speeds}: {claimed} false claims")
        assert claimed <= 0.05 * repetitions
