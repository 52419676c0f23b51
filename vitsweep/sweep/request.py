"""RunRequest: what a worker process is told; everything else it reads from the cell's folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run of one cell.

    Attributes:
        sweep_folder: folder of the sweep.
        cell_id: whose `cell.yaml` is to be read.
        run_id: name of the run.
        block: name of its block.
        position: its place within the block.
        attempt: 1 for the first try.
        init_method: rendezvous of the ranks (`file://...` or `tcp://host:port`).
        proved: how equality was proved earlier, or "".
        calibration: matmul TFLOP/s by dtype and all-reduce GB/s of this machine.
        environment: columns known to the launcher (git state, queue time).
    """

    sweep_folder: Path
    cell_id: str
    run_id: str
    block: str
    position: int
    attempt: int = 1
    init_method: str
    proved: str = ""
    calibration: dict[str, float] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the run's failures, logs and trace, beside its record."""
        return (
            self.sweep_folder
            / "cells"
            / self.cell_id
            / "attempts"
            / f"{self.run_id}.{self.attempt}"
        )

    def plain(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self) | {"sweep_folder": str(self.sweep_folder)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RunRequest":
        """Read what `plain` wrote."""
        return cls(**{**plain, "sweep_folder": Path(plain["sweep_folder"])})
