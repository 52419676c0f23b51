"""Whether an attempt of all ranks failed, and whether it failed alike on all of them."""

from contextlib import suppress
from datetime import timedelta
from itertools import count

from torch.distributed.distributed_c10d import _get_default_store

from vitsweep.collectives.primitives import gathered
from vitsweep.model.module_look import shortened
from vitsweep.world import World

GRACE_S = 60.0
"""So long a rank that failed waits for the others to fail alike. They may hang in an exchange with it."""
_FAILED = count()
"""Numbers the attempts that failed, on all ranks alike."""


def voted(error: Exception | None, world: World) -> tuple[str, bool]:
    """Return why an attempt failed, and whether it did alike on all ranks; "" where it failed on none.

    Every rank calls it after its attempt, and gets the same. A rank that failed exchanges nothing with the
    others through their process group, in which they may wait for it, but through its store.

    Args:
        error: of this rank's attempt.
        world: the ranks.
    """
    try:
        if error is None:
            gathered(True)
            return "", True
    except Exception as lost:  # another rank has left, or died
        error = lost
    kind, key, is_alike = type(error).__name__, f"vitsweep/failed/{next(_FAILED)}", False
    why = f"{kind} on rank {world.rank}: {shortened(str(error))}"
    with suppress(RuntimeError):  # the rank that kept the store is gone
        store = _get_default_store()
        why = store.compare_set(f"{key}/first", "", why).decode()
        if store.add(f"{key}/{kind}", 1) == world.size:
            store.set(f"{key}/alike", "")
        with suppress(RuntimeError):  # others do not fail alike in time
            store.wait([f"{key}/alike"], timedelta(seconds=GRACE_S))
            is_alike = True
        store.add(f"{key}/{kind}", is_alike - 1)
    return why, is_alike
