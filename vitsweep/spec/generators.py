"""The generators that code of the user's draws from: `random`, `numpy.random` and torch's default ones.

A state that is set follows from a seed and a purpose, such as an image of an epoch, and is given back
afterwards. torch is asked only where it is loaded already: what plans or reads results needs none.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def named_seed(seed: int, name: str) -> int:
    """Return a seed that follows from a seed and a name, in 48 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


def set_generators(seed: int, device: Any = None) -> None:
    """Set the states; `torch.initial_seed()` is `seed` then.

    Args:
        seed: of all; numpy's is drawn from it, since equal seeds give torch and numpy equal bits.
        device: whose default generator is set too, where it is a CUDA device.
    """
    import numpy as np

    random.seed(seed)
    np.random.seed(named_seed(seed, "numpy") % 2**32)
    if torch := sys.modules.get("torch"):
        # not `torch.manual_seed`, which is for all devices
        torch.default_generator.manual_seed(seed)
        if _is_cuda(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def kept_generators(device: Any = None) -> Iterator[None]:
    """Context at whose end the generators have the states that they had at its beginning."""
    import numpy as np

    kept: list[Any] = [(random.setstate, random.getstate())]
    kept.append((np.random.set_state, np.random.get_state()))
    if torch := sys.modules.get("torch"):
        kept.append((torch.set_rng_state, torch.get_rng_state()))
        if _is_cuda(device):
            state = torch.cuda.get_rng_state(device)
            kept.append((partial(torch.cuda.set_rng_state, device=device), state))
    try:
        yield
    finally:
        for give_back, state in kept:
            give_back(state)


def _is_cuda(device: Any) -> bool:
    return device is not None and device.type == "cuda"


@contextmanager
def seeded_generators(seed: int, purpose: str, device: Any = None) -> Iterator[None]:
    """Context in which the states follow from a seed and a purpose; they are given back at its end."""
    with kept_generators(device):
        set_generators(named_seed(seed, purpose), device)
        yield
