"""How many graphs torch.compile has compiled."""

import sys


def compiled_graphs() -> int | None:
    """Return the graphs that were compiled in this process so far, each with its backward graph.

    A graph that is cut (by a hook, or by DDP's buckets) counts once per part. The counter is private
    to torch: None where it is missing.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    if dynamo is None:
        return 0
    counters = getattr(dynamo, "counters", None)
    return None if counters is None else int(counters["aot_autograd"]["total"])
