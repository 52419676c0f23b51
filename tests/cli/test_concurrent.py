"""Verbs that write the same files at the same time."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.cli.test_full_disk import SAMPLE
from tests.command import Command


@pytest.mark.slow
def test_four_collects_at_once_leave_whole_tables(vitsweep: Command) -> None:
    folder = Path(shutil.copytree(SAMPLE, vitsweep.folder / "results" / "sample"))
    rows = len(pd.read_parquet(folder / "runs.parquet"))
    (folder / "runs.parquet").unlink()
    running = [vitsweep.fork("collect", "sample", quick=False) for _ in range(4)]
    ends = [(*process.communicate(timeout=240), process.returncode) for process in running]
    assert [code for *_, code in ends] == [0] * 4, ends
    assert len(pd.read_parquet(folder / "runs.parquet")) == rows
    assert not list(folder.glob(".*.draft"))
