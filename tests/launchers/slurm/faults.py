"""Faults that strike a run once: what a later attempt finds is a healthy cell."""

import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults import Fault


@dataclass(frozen=True, kw_only=True)
class HangOnce(Fault):
    """Hangs unless it has done so before; `marker` is the file that remembers."""

    marker: str

    def strike(self) -> None:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class HeldUntil(Fault):
    """Waits until there is a file `go` in `folder`; the file `waiting` says that it does."""

    folder: str

    def strike(self) -> None:
        Path(self.folder, "waiting").touch()
        while not Path(self.folder, "go").exists():
            time.sleep(0.05)
