"""All pairs of choices in few combinations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random

Combination = dict[str, str]


def all_pairs(
    groups: Mapping[str, Sequence[str]], possible: Callable[[Combination], bool], seed: int = 0
) -> list[Combination]:
    """Return combinations that hold every pair of choices that any possible combination holds.

    Greedy: each combination is the best of a few random ones that contain an open pair.
    """
    random, chosen = Random(seed), []
    open_pairs = set(_pairs_of_groups(groups))
    while open_pairs:
        pair = min(open_pairs)
        tries = [_with_pair(pair, groups, random) for _ in range(60)]
        tries.sort(key=lambda c: -len(open_pairs & set(_pairs(c))))
        if (best := next(filter(possible, tries), None)) is not None:
            chosen.append(best)
            open_pairs -= set(_pairs(best))
        open_pairs.discard(pair)
    return chosen


def _with_pair(
    pair: tuple[tuple[str, str], ...], groups: Mapping[str, Sequence[str]], random: Random
) -> Combination:
    return {group: random.choice(choices) for group, choices in groups.items()} | dict(pair)


def _pairs_of_groups(groups: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    for a, b in combinations(sorted(groups), 2):
        for left, right in product(groups[a], groups[b]):
            yield (a, left), (b, right)


def _pairs(combination: Combination) -> Iterator[tuple[tuple[str, str], ...]]:
    return combinations(sorted(combination.items()), 2)
