"""What a plan is to predict, and what it writes (no torch)."""

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of `vitsweep plan`.

    Attributes:
        predict: whether memory, communication and step time are predicted.
        hardware: devices or profile files to plan for; empty for this machine.
        columns: of the table, in their order; `all` prints all of them below each cell; empty for the
            most important ones.
        parquet: file for all columns, or None.
        html: file for a page, or None.
    """

    predict: bool = True
    hardware: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    parquet: Path | None = None
    html: Path | None = None


CURRENT: ContextVar[PlanRequest] = ContextVar("plan_request", default=PlanRequest())  # noqa: B039
"""Set by the command line: between it and the planner lies Hydra, which takes no arguments for others."""
