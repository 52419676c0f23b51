"""States of the generators that a user's code draws from."""

import random

import numpy as np
import torch

from vitsweep.spec.generators import (
    kept_generators,
    seeded_generators,
    set_generators,
)


def drawn() -> tuple[float, ...]:
    """One number of each, and a normal one, of which numpy and `random` keep a second for the next call."""
    return (
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        float(torch.rand(1)),
    )


def test_a_block_draws_what_follows_from_seed_and_purpose_and_leaves_no_trace() -> None:
    with kept_generators():
        set_generators(3)
        untouched = [drawn() for _ in range(3)]
        set_generators(3)
        assert torch.initial_seed() == 3
        going_on, inside = [drawn()], []
        for seed, purpose in ((0, "a"), (0, "a"), (0, "b"), (1, "a")):
            with seeded_generators(seed, purpose):
                inside.append(drawn())
            going_on += [drawn()] if len(going_on) < 3 else []
        assert going_on == untouched
    assert inside[0] == inside[1]
    assert all(len({one[i] for one in inside}) == 3 for i in range(5))


def test_no_two_generators_have_the_same_bits() -> None:
    with seeded_generators(0, "any"):
        bits = (
            random.getrandbits(32),
            int(np.random.randint(2**32)),
            int(torch.empty(1, dtype=torch.int64).random_(2**32)),
        )
    assert len(set(bits)) == 3
