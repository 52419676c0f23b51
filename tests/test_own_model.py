"""examples/own_model, copied outside of the checkout: model, data, technique and metric of a user's."""

import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

import vitsweep
from tests.command import NO_REPORT, ROOT
from vitsweep.api.conf_check import Finding, check_conf, is_sentence

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
    done = python(outside, "run.py", *QUICK, NO_REPORT)  # the script asks for it itself
    assert done.returncode == 0, done.stderr
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


@pytest.mark.full
def test_check_finds_nothing_wrong_with_it(outside):
    done = python(outside, "-m", "vitsweep", "check", "conf")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("equals plain training on 2 ranks") == 3
    assert "WRONG" not in done.stdout


MODEL = """
_target_: vitsweep.model.module_spec.ModuleSpec
target: {target}
arguments: {{}}
shape_arguments: {{}}
passes_name: false
blocks: auto
output: null
seams: []
twin_arguments: {{}}
twin_side_px: null
in_channels: auto
num_classes: auto
head: classify
package: null
version: null
"""
DATA = """
_target_: vitsweep.data.module_data.ModuleData
target: tests.user_data.MapStyle
arguments: {{side: {side}}}
test_arguments: null
num_channels: 1
num_classes: 10
native_resolution_px: 8
num_images: null
num_workers: 0
prefetch_batches: 2
"""


def found_in(folder: Path, **choices: str) -> list[Finding]:
    """Check a folder of some choices, named like `group__name`, without running what is fine."""
    write(folder, **choices)
    return list(islice(check_conf(folder, Console(quiet=True)), len(choices)))


def write(folder: Path, **choices: str) -> None:
    for choice, text in choices.items():
        path = folder / f"{choice.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_check_finds_a_model_that_cannot_be_built_and_data_of_another_shape(tmp_path):
    broken = MODEL.format(target="tests.user_modules.nosuch")
    data, model = found_in(tmp_path, data__mine=DATA.format(side=7), model__broken=broken)
    assert (data.result, model.result) == ("WRONG", "WRONG")
    assert "gives images of shape (1, 7, 7)" in data.fault
    assert "`model.target=tests.user_modules.nosuch` cannot be imported" in model.fault
    assert str(data).startswith("data=mine: composes: WRONG: `data.target=")


def test_check_tries_a_model_with_data_of_its_folder(tmp_path):
    own = MODEL.format(target="tests.user_modules.build").replace("{}", "{channels: 3}", 1)
    three = DATA.format(side=8).replace("num_channels: 1", "num_channels: 3")
    three = three.replace("MapStyle", "Coloured")
    data, model = found_in(tmp_path, data__mine=three, model__own=own)
    assert (data.result, model.result) == ("fine", "fine"), (data.fault, model.fault)


def technique(name: str) -> str:
    return f"_target_: tests.user_techniques.{name}\n"


SAYS_SENTENCES = "its conflicts are sentences"


def test_check_reads_reasons_that_do_not_name_their_choice_and_says_what_is_refused_everywhere(
    tmp_path,
):
    write(tmp_path, memory__mumbles=technique("Mumbles"), memory__needs_more=technique("NeedsMore"))
    composes, mumbled, nowhere, _, sentences, nowhere_too, *runs = check_conf(
        tmp_path, Console(quiet=True)
    )
    assert composes.choice == mumbled.choice == nowhere.choice == "memory=mumbles"
    assert (mumbled.test, mumbled.fault) == (
        SAYS_SENTENCES, "no full sentence that names a way out: 'no'",
    )  # fmt: skip
    assert (sentences.test, sentences.result, sentences.note) == (SAYS_SENTENCES, "fine", "1 found")
    for finding in (nowhere, nowhere_too):
        assert (finding.test, finding.result) == ("some cell can run with it", "not run")
        assert "it was refused in all " in finding.note
        assert "could not be compared with plain training: " in finding.note
    assert [found.result for found in runs] == ["not run"] * 4


def test_check_tries_a_technique_on_one_rank_before_it_says_that_it_is_refused(tmp_path):
    write(tmp_path, memory__one_rank=technique("OneRank"))
    _, sentences, more = islice(check_conf(tmp_path, Console(quiet=True)), 3)
    assert (sentences.test, sentences.result) == (SAYS_SENTENCES, "fine")
    assert more.test == "equals plain training on 1 rank"


def test_check_goes_on_after_a_rule_that_raises(tmp_path):
    write(
        tmp_path, loader__fine="_target_: vitsweep.spec.data.Loader\n",
        memory__counts=technique("Counts"), memory__elsewhere=technique("RaisesElsewhere"),
        memory__here=technique("RaisesHere"), memory__raises=technique("Raises"),
    )  # fmt: skip
    found = list(islice(check_conf(tmp_path, Console(quiet=True)), 6))
    faults = {one.choice: one.fault for one in found if one.fault}
    assert [one.result for one in found] == ["fine"] * 2 + ["WRONG"] * 4
    assert "user_techniques.Counts.conflicts` yielded [3], but it must" in faults["memory=counts"]
    assert "`axes` raised ZeroDivisionError: of its own (" in faults["memory=elsewhere"]
    assert "user_techniques.py, line " in faults["memory=elsewhere"]
    assert "RaisesHere.lacking_here` raised OSError: no such device" in faults["memory=here"]
    assert faults["memory=raises"] == (
        "`memory=raises`: `tests.user_techniques.Raises.conflicts` raised KeyError: 'x', but it must "
        "yield a sentence for each reason why a cell cannot run: mend it, or choose another `memory`."
    )


def test_check_finds_a_rule_that_raises_beside_another_choice(tmp_path):
    write(tmp_path, memory__sometimes=technique("RaisesBesideFsdp"))
    composes, conflicts = islice(check_conf(tmp_path, Console(quiet=True)), 2)
    assert (composes.result, conflicts.test) == ("fine", SAYS_SENTENCES)
    assert "RaisesBesideFsdp.conflicts` raised KeyError: 'x'" in conflicts.fault


def test_a_plan_names_the_technique_whose_rule_raises(tmp_path):
    write(tmp_path, memory__raises=technique("Raises"))
    with pytest.raises(
        vitsweep.BadValueError, match=r"user_techniques\.Raises\.conflicts` raised"
    ) as no:
        vitsweep.plan("memory=keep_all,raises", config_dir=tmp_path)
    assert len(str(no.value).splitlines()) == 1


@pytest.mark.full
def test_check_finds_a_technique_that_changes_the_training_and_one_that_grumbles(outside):
    code = outside / "own_model" / "techniques.py"
    text = code.read_text().replace(
        "return model", "model.head.weight.data *= 2\n        return model"
    )
    code.write_text(text.replace('`memory=recompute_blocks`."', '`memory=recompute_blocks`"'))
    done = python(outside, "-m", "vitsweep", "check", "conf")
    assert done.returncode == 3
    assert "wrong: The nano twin's " in done.stdout
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
