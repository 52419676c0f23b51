"""Which settings go on, from their blocks so far: numbers in, decisions out."""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

import numpy as np

from vitsweep.extras.compare.comparison import Comparison, compared
from vitsweep.extras.race.halving import Runs, standing
from vitsweep.tables.formatting import count


class Block(NamedTuple):
    """Steps of one setting in a row.

    Attributes:
        turn: in which all settings that are left have one block each.
        setting: its name.
        seconds: of a step, on the slowest rank.
    """

    turn: int
    setting: str
    seconds: float


def between(blocks: Sequence[Block], a: str, b: str) -> Comparison:
    """Return the throughput of a setting over that of another, from the turns that have both."""
    logs = {(block.turn, block.setting): log(block.seconds) for block in blocks}
    turns = dict.fromkeys(block.turn for block in blocks)
    return compared([logs[t, b] - logs[t, a] for t in turns if {(t, a), (t, b)} <= logs.keys()])


def next_turn(
    blocks: Sequence[Block], settings: Sequence[str], left_out: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return which settings have a block in the next turn, the fastest first, and why others have none more.

    The slower half is dropped after each turn until few are left, see `halving`. Then, and of the first
    setting at any time, one is out whose interval says that the fastest is faster, see `compared`.

    Args:
        blocks: oldest first.
        settings: all of them, as typed.
        left_out: those that are out already.
    """
    gone = np.array([name in left_out for name in settings])
    if not blocks:
        return [name for name in settings if name not in left_out], {}
    of_setting = np.array([settings.index(block.setting) for block in blocks], np.int64)
    turns = np.array([str(block.turn) for block in blocks])
    runs = Runs(of_setting, turns, -np.log([block.seconds for block in blocks]))
    first = int(np.argmin(gone))
    at = standing(runs, gone, range(first + 1))
    out = {
        settings[n]: f"it is in the slower half after {count(number, 'turn')}"
        for n, number in at.dropped.items()
        if not gone[n]
    }
    fastest, *others = [settings[n] for n in at.best] or [settings[first]]
    for name in others:
        if (found := between(blocks, fastest, name)).low > 1:
            out[name] = found.sentence(fastest, name)
    left = [fastest, *others, *(settings[n] for n in (first, *at.lacking))]
    return [name for name in dict.fromkeys(left) if name not in out], out
