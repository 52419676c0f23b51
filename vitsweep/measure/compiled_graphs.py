"""How many graphs torch.compile has compiled, and for how long."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done in this process.

    Attributes:
        graphs: compiled, each with its backward graph; None where unknown.
        seconds: that it took; None where unknown.
        skipped: CUDA graphs that TorchInductor left out; None where unknown.
    """

    graphs: int | None
    seconds: float | None
    skipped: int | None

    @classmethod
    def so_far(cls) -> "Compiled":
        """Return all that was compiled up to now."""
        return cls(compiled_graphs(), compile_seconds(), skipped_graphs())

    def since(self, before: "Compiled") -> "Compiled":
        """Return what was compiled after an earlier look."""
        graphs, seconds, skipped = None, None, None
        if self.graphs is not None and before.graphs is not None:
            graphs = self.graphs - before.graphs
        if self.seconds is not None and before.seconds is not None:
            seconds = self.seconds - before.seconds
        if self.skipped is not None and before.skipped is not None:
            skipped = self.skipped - before.skipped
        return Compiled(graphs, seconds, skipped)


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


def skipped_graphs() -> int | None:
    """Return how often TorchInductor went without a CUDA graph that was asked for.

    It only logs why. The counter is private to torch: None where it is missing.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = getattr(dynamo, "counters", None)
    return None if counters is None else int(counters["inductor"]["cudagraph_skips"])


def compile_seconds() -> float | None:
    """Return the seconds that torch.compile took in this process so far, backward graphs included.

    The sums are private to torch: None where they are missing.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    spent = getattr(dynamo, "cumulative_time_spent_ns", None)
    if spent is None:
        return None
    # the first contains the forward graph's compilation by TorchInductor, the second is apart
    return float(
        sum(spent.get(k, 0) for k in ("entire_frame_compile", "entire_backward_compile")) / 1e9
    )
