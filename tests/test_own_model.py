"""examples/own_model, copied outside of the checkout: model, data, technique and metric of a user's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import vitsweep
from tests.command import NO_REPORT, ROOT, forked, run_as_script

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


# Half a minute: the script of the example, five cells in processes of their own.
@pytest.mark.slow
def test_its_script_measures_own_model_data_technique_and_metric(outside):
    words = ["run.py", *QUICK, NO_REPORT]  # the script asks for the report itself
    running = forked(run_as_script, words, outside, os.environ | {"COLUMNS": "250"})
    _, error = running.communicate(500)
    assert running.returncode == 0, error
    cells = pd.read_parquet(outside / "results" / "own_model" / "cells.parquet")
    assert len(cells) == 5, "four cells and their baseline"
    assert set(cells["status"]) == {"measured"}, cells["reason"]
    assert cells["proved"].str.startswith("twin ").all()
    assert (cells["usd_per_million_images"] > 0).all()
    assert set(cells["flops_source"]) == {"torch.utils.flop_counter"}
    report = (outside / "results" / "own_model" / "report" / "index.html").read_text()
    assert "Cost of a million images (USD)" in report


@pytest.mark.slow
def test_a_model_with_frozen_parameters_is_measured_proved_and_predicted(vitsweep):
    done = vitsweep(
        "-m", "model=module", "model.target=tests.user_modules.frozen", "sharding=fsdp",
        "resources.ranks_per_node=2", "batch.images_per_step=16", "resources.threads_per_rank=1",
        NO_REPORT, *QUICK, quick=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = vitsweep.cells()
    assert set(cells["status"]) == {"measured"}, cells["reason"]
    assert cells["proved"].str.startswith("twin ").all()
    assert cells["activation_gib"].notna().all()
    trained = 16 * 16 + 16 + 10 * 16 + 10 + 3 * 16  # one block, the head, the bias of the stem
    ddp = cells[cells["sharding"] == "ddp"].iloc[0]
    assert ddp["gradient_gib"] * 2**30 == 4 * trained


def write(folder: Path, **choices: str) -> None:
    for choice, text in choices.items():
        path = folder / f"{choice.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def technique(name: str) -> str:
    return f"_target_: tests.user_techniques.{name}\n"


def test_a_plan_names_the_technique_whose_rule_raises(tmp_path):
    write(tmp_path, memory__raises=technique("Raises"))
    with pytest.raises(
        vitsweep.BadValueError, match=r"user_techniques\.Raises\.conflicts` raised"
    ) as no:
        vitsweep.plan("memory=keep_all,raises", config_dir=tmp_path)
    assert len(str(no.value).splitlines()) == 1


@pytest.mark.full
def test_its_named_sweep_runs_from_the_command_line(outside):
    done = python(
        outside, "-m", "vitsweep", "--config-dir", "conf", "-m", "+sweep=own_first", "metric=cost",
        *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Cost of a million images (USD)" in done.stdout


SMALL_VITS = {
    "timm": (
        "model.name=vit_tiny_patch16_224", "++model.arguments.patch_size=4",
        "++model.arguments.depth=2", "++model.arguments.embed_dim=32", "++model.arguments.num_heads=2",
    ),
    "transformers": (
        "model.name=vit", "++model.arguments.patch_size=4", "++model.arguments.hidden_size=32",
        "++model.arguments.num_hidden_layers=2", "++model.arguments.num_attention_heads=2",
        "++model.arguments.intermediate_size=64",
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("compilation", ["eager", "compile_blocks"])
@pytest.mark.parametrize("library", SMALL_VITS)
def test_a_vit_of_a_library_goes_through_a_sweep_of_techniques(library, compilation, tmp_path):
    pytest.importorskip(library)
    done = python(
        tmp_path, "-m", "vitsweep", "-m", f"model={library}", *SMALL_VITS[library],
        "sharding=ddp,fsdp", "precision=O1,O2", "memory=keep_all,recompute_blocks",
        f"compilation={compilation}", "batch.images_per_step=16", "resources.threads_per_rank=1",
        "sweep.name=library", "sweep.report=false", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = pd.read_parquet(tmp_path / "results" / "library" / "cells.parquet")
    assert len(cells) == 9, "eight cells and their baseline"
    assert set(cells["status"]) == {"measured"}, cells["reason"]
    assert cells["proved"].str.startswith("twin ").all()
