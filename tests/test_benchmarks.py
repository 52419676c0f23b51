"""The benchmarks run, at a size that says nothing about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path) -> None:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_peers_are_compared_in_paired_blocks_with_intervals(tmp_path: Path) -> None:
    size = ("--smoke", "--blocks", "3", "--models", "vit_tiny", "--precisions", "fp32")
    run("peers.py", *size, "--out", tmp_path)
    [kept] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    [table] = kept["tables"]
    rows = {row["contender"]: row for row in table["rows"]}
    assert {"vitsweep batch_first", "transformers sdpa"} <= set(rows)
    others = [row for row in rows.values() if row["contender"] != row["vitsweep_best"]]
    assert all(row["low"] < row["vitsweep_speedup"] < row["high"] for row in others)
    assert all(row["step_ms"] > 0 and row["peak_gib"] > 0.1 for row in rows.values())
    assert kept["date"]
    assert kept["environment"]["device"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_that_one_gpu_is_asked_runs_without_one(tmp_path: Path) -> None:
    run("gpu.py", "--smoke", "--out", tmp_path)
    for model in ("vit_base", "vit_large"):
        cells = pd.read_csv(tmp_path / f"blog_{model}-cells.csv")
        assert (cells["status"] == "measured").sum() == len(cells) == 13
    assert list(tmp_path.glob("peers-smoke-*.json"))
