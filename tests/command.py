"""`python -m vitsweep` as a user types it, in a folder of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pandas import DataFrame

from tests.cells import TINY
from vitsweep.results.store import Store

ROOT = Path(__file__).parents[1]
QUICK = (
    *TINY,
    "measurement=smoke",
    "measurement.measured_steps=2",
    "measurement.warmup_steps=1",
    "measurement.phase_steps=1",
)
"""Cells of a second or two."""


@dataclass(frozen=True)
class Command:
    """Runs vitsweep in `folder` and reads what it left there."""

    folder: Path

    def __call__(self, *arguments: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.line(*arguments, quick=quick), **self._settings(), timeout=300)  # type: ignore[call-overload,no-any-return]

    def start(self, *arguments: str, quick: bool = True) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.line(*arguments, quick=quick), **self._settings(), start_new_session=True
        )  # type: ignore[call-overload,no-any-return]

    def line(self, *arguments: str, quick: bool) -> list[str]:
        words = [a for a in arguments if "=" not in a]
        typed = [a for a in arguments if "=" in a]  # after the quick ones: the last of a key counts
        return [sys.executable, "-m", "vitsweep", *words, *(QUICK if quick else ()), *typed]

    def _settings(self) -> dict[str, object]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }
        return {
            "cwd": self.folder,
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }

    @property
    def store(self) -> Store:
        return Store(self.folder / "results" / "default")

    def cells(self, sweep: str = "default") -> DataFrame:
        """The table, one row per cell."""
        return pd.read_parquet(self.store.root.with_name(sweep) / "cells.parquet")

    def runs(self) -> DataFrame:
        return pd.read_parquet(self.store.root / "runs.parquet")


def fault(name: str, rank: int = 1) -> list[str]:
    """Overrides that plant a fault into a cell."""
    return [f"sequence_parallel._target_=tests.faults.{name}", f"+sequence_parallel.rank={rank}"]
