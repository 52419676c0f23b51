"""examples/own_model, copied outside of the checkout: model, data, technique and metric of a user's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.command import ROOT
from vitsweep.api.conf_check import is_sentence

QUICK = ["measurement=smoke", "measurement.prove=twin", "measurement.warmup_steps=0",
         "measurement.measured_steps=2", "measurement.phase_steps=1"]  # fmt: skip


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "examples" / "own_model", tmp_path / "own_model")


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=550,
        env=os.environ | {"COLUMNS": "250"},
    )  # fmt: skip


@pytest.mark.slow
def test_its_script_measures_own_model_data_technique_and_metric(outside):
    done = python(outside, "run.py", *QUICK)
    assert done.returncode == 0, done.stderr
    cells = pd.read_parquet(outside / "results" / "own_model" / "cells.parquet")
    assert len(cells) == 5, "four cells and their baseline"
    assert set(cells["status"]) == {"measured"}, cells["reason"]
    assert cells["proved"].str.startswith("twin ").all()
    assert (cells["usd_per_million_images"] > 0).all()
    assert set(cells["flops_source"]) == {"torch.utils.flop_counter"}
    report = (outside / "results" / "own_model" / "report" / "index.html").read_text()
    assert "Cost of a million images (USD)" in report


@pytest.mark.full
def test_check_finds_nothing_wrong_with_it(outside):
    done = python(outside, "-m", "vitsweep", "check", "conf")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("equals plain training on 2 ranks") == 3
    assert "WRONG" not in done.stdout


@pytest.mark.full
def test_check_finds_a_technique_that_changes_the_training_and_one_that_grumbles(outside):
    code = outside / "own_model" / "techniques.py"
    text = code.read_text().replace(
        "return model", "model.head.weight.data *= 2\n        return model"
    )
    code.write_text(text.replace('`memory=recompute_blocks`."', '`memory=recompute_blocks`"'))
    done = python(outside, "-m", "vitsweep", "check", "conf")
    assert done.returncode == 3
    assert "wrong: The nano twin's losses" in done.stdout
    assert "no full sentence that names a way out" in done.stdout


@pytest.mark.full
def test_its_named_sweep_runs_from_the_command_line(outside):
    done = python(
        outside, "-m", "vitsweep", "--config-dir", "conf", "-m", "+sweep=own_first", "metric=cost",
        *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Cost of a million images (USD)" in done.stdout


@pytest.mark.parametrize(
    ("reason", "fine"),
    [
        ("`memory=mine` needs `resources.device=cuda`; got cpu. Use `memory=keep_all`.", True),
        ("`memory=mine` needs `resources.device=cuda`; got cpu", False),
        ("not on cpu.", False),
        ("This does not work on a machine without GPUs.", False),
    ],
)
def test_a_reason_is_a_sentence_with_a_setting_in_it(reason, fine):
    assert is_sentence(reason) is fine
