"""Rates of a CPU that nobody measured: an order of magnitude, with an interval that says so."""

import math

from vitsweep.predict.rates import Rates
from vitsweep.predict.step_trace import CollectiveTotal, OperatorTotal
from vitsweep.spec.resources import Resources

GFLOPS_PER_CORE = 50.0
"""Of products in float32 by AVX2 or AVX-512 at 2 to 3 GHz: some 40 % of the peak (assumed)."""
GB_S = 10.0
"""Memory bandwidth that a few cores reach (assumed)."""
LOCAL_GB_S = 1.0
"""All-reduce of gloo between processes of one machine: 25 MiB in 12 to 40 ms."""


class UncalibratedCpuRates(Rates):
    """Assumed rates; `vitsweep doctor --calibrate` replaces them by measured ones.

    Args:
        resources: ranks and threads of the cell.
    """

    asynchronous = False

    def __init__(self, resources: Resources) -> None:
        cores = min(resources.threads_per_rank, resources.cores_per_node)
        crowd = resources.ranks_per_node * resources.threads_per_rank / resources.cores_per_node
        self._cores, self._crowd = cores, max(1.0, crowd)

    @property
    def title(self) -> str:
        """Says that nothing was measured."""
        return "a CPU that is not calibrated"

    @property
    def dispatch_us(self) -> float:
        """Some microseconds of Python and of the dispatcher (assumed)."""
        return 8.0 * self._crowd

    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Return the larger of computing and memory time."""
        if not operator.count:
            return 0.0
        computing = operator.flops / (GFLOPS_PER_CORE * self._cores) / 1e3
        moving = operator.bytes_moved / GB_S / 1e3
        return max(computing, moving) / operator.count * self._crowd

    def collective_us(self, collective: CollectiveTotal) -> float:
        """Return a latency and a share of the bandwidth of gloo."""
        if collective.group_ranks < 2:
            return 0.0
        hops = math.log2(collective.group_ranks)
        return (200 * hops + collective.bytes_whole / LOCAL_GB_S / 1e3) * self._crowd

    def log_error(self, part: str) -> float:
        """A factor of two either way."""
        return 0.6 if part == "step" else 0.2
