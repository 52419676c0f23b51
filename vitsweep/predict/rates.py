"""Rates: how long one operator and one collective take on a device."""

from abc import ABC, abstractmethod
from typing import ClassVar

from vitsweep.predict.step_trace import CollectiveTotal, OperatorTotal


class Rates(ABC):
    """Times of operators and collectives on one device.

    Attributes:
        asynchronous: whether the host only queues operators (GPU), so that dispatching one and
            computing another happen at once. On a CPU the times add up, and communication takes
            cores from computing.
    """

    asynchronous: ClassVar[bool]

    @property
    @abstractmethod
    def title(self) -> str:
        """Of which device these are, and where they come from."""

    @property
    @abstractmethod
    def dispatch_us(self) -> float:
        """Host time of one dispatched operator in microseconds, beside what it computes."""

    @property
    def step_overhead(self) -> float:
        """Whole steps over the sum of their parts."""
        return 1.0

    @abstractmethod
    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Microseconds of one call.

        Args:
            operator: its kind, shape and bytes.
            tf32: whether float32 products may use TensorFloat-32.
        """

    @abstractmethod
    def collective_us(self, collective: CollectiveTotal) -> float:
        """Microseconds of one call, with nothing else running."""

    @abstractmethod
    def log_error(self, part: str) -> float:
        """Standard deviation of log(measured / predicted) of a part of the step.

        Args:
            part: `compute`, `optimizer`, `communication`, `launch`, `bubble`, `data` or `step` (what all
                parts have in common).
        """

    def compiled_dispatch(self, captured: bool) -> float:
        """Host time of a compiled step relative to eager; `captured` by CUDA graphs."""
        return 1.0

    @property
    def compiled_memory(self) -> float:
        """Bytes that element-wise kernels move when a compiler fuses them, relative to eager."""
        return 1.0

    def overlap_charge(self, collective: CollectiveTotal) -> float:
        """Share by which computing slows down while this collective runs beside it."""
        return 0.0

    def notes(self, dtypes: set[str]) -> tuple[str, ...]:
        """Full sentences on what is not known of this device, for the dtypes of a step."""
        return ()
