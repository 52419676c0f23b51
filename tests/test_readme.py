"""Everything that the README prints to be typed runs as printed, in order, in a small checkout."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cells import LAPTOP, composer
from tests.data.pictures import write_folder
from vitsweep.cli.verbs import VERBS
from vitsweep.composition.grid import expand
from vitsweep.planning.sweep_plan import plan_cell

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = ("vitsweep", "hydra_plugins", "conf", "analysis", "benchmarks")

ONE_STEP = {
    "warmup_steps": 0,
    "warmup_min_seconds": 0,
    "measured_steps": 1,
    "min_seconds": 0,
    "phase_steps": 1,
    "blocks": 1,
}
ONE_BLOCK = {"depth": 1, "width": 64, "num_heads": 2, "mlp_width": 64}
SMALLER = {
    "config.yaml": {"sweep": {"limit": {"most": 32}}},
    "measurement/standard.yaml": ONE_STEP,
    "measurement/careful.yaml": ONE_STEP,
    "batch/base.yaml": {"images_per_step": 16},
    "batch/blog_560.yaml": {"images_per_step": 4},
    "task/train.yaml": {"epochs": 1, "warmup_epochs": 0},
    "model/vit_nano.yaml": {"depth": 1},
    "model/vit_small.yaml": ONE_BLOCK,
    "model/vit_base.yaml": ONE_BLOCK,
    "model/video_vit_nano.yaml": {"depth": 2},
}
"""Settings of the copied conf/ that make each printed command take seconds."""

INSTALLS = ("make sweep", "make test")
"""Commands that install into .venv and run for minutes: `.ci/run` and the story's test run them."""

EXIT_CODES = {
    "optimizer=glob(adamw_*)": 3,  # a choice needs more than this machine has, such as apex
    "vitsweep gate": 1,  # one block per cell is too few to judge
}
"""Part of a command -> its exit code with these settings on this machine, where that is not 0."""


def exit_code(command: str) -> int:
    return next((code for part, code in EXIT_CODES.items() if part in command), 0)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith(INSTALLS)]


def merged(old: dict, new: dict) -> dict:
    return {**old, **{k: merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items()}}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code whose settings are small, with a `.venv` to activate."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, smaller in SMALLER.items():
        path = folder / "conf" / name
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), smaller)))
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    write_folder(folder / "pictures")
    return folder


def run(command: str, checkout: Path) -> "subprocess.CompletedProcess[str]":
    """Type a command after `. .venv/bin/activate`; comparisons and races end after few blocks."""
    command = command.replace("/data/imagenet", str(checkout / "pictures"))
    if " compare " in command:
        command += " --minutes 0.01"
    command = command.replace("sweep.minutes=30", "sweep.minutes=1")
    return subprocess.run(
        ["bash", "-c", f". .venv/bin/activate; {command}"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def write_named(block: str, checkout: Path) -> str:
    """Write a file whose path is the first comment of its block."""
    first, _, text = block.partition("\n")
    path = first.removeprefix("# ")
    (checkout / path).write_text(text)
    return path


def test_every_cell_that_a_command_of_the_readme_names_can_be_planned() -> None:
    """Composed, typed and checked, at full size; choices that need a GPU are refused with a reason."""
    typed = [shlex.split(c, comments=True) for b in blocks("bash") for c in commands(b)]
    sweeps = [words[3:] for words in typed if words[:3] == ["python", "-m", "vitsweep"]]
    sweeps = [[w for w in words if w != "-m"] for words in sweeps if words[0] not in VERBS]

    for overrides in sweeps:
        cells = expand(overrides, composer())
        if "data=image_folder" not in overrides:  # its folder is the reader's own
            assert any(not plan_cell(cell, LAPTOP).reasons for cell in cells), overrides
    assert len(sweeps) >= 9


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_command_of_the_readme_runs_as_printed(checkout: Path) -> None:
    """In one test, since later commands read what earlier ones measured."""
    files = [
        b for b in blocks("python") + blocks("yaml") if b.startswith(("# vitsweep/", "# conf/"))
    ]
    written = [write_named(block, checkout) for block in files]
    typed = [command for block in blocks("bash") for command in commands(block)]

    ended = {command: run(command, checkout) for command in typed}

    wrong = {
        command: done.stdout + done.stderr
        for command, done in ended.items()
        if done.returncode != exit_code(command) or "Traceback" in done.stderr
    }
    assert not wrong, "\n\n".join(f"$ {c}\n{text}" for c, text in wrong.items())
    assert len(typed) >= 14
    assert written == [
        "vitsweep/techniques/memory/recompute_mlp.py",
        "conf/memory/recompute_mlp.yaml",
    ]
    [pandas] = [block for block in blocks("python") if "read_parquet" in block]
    done = run(f"python - <<'END'\n{pandas}\nEND", checkout)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_path_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    words = set(re.findall(r"`([\w./-]+/[\w./-]*)`|\]\(([\w./-]+)\)", text))
    paths = {a or b for a, b in words}
    paths = {p for p in paths if not re.search(r"NAME|GROUP|VERB|results/|recompute_mlp|img/s", p)}
    there = {p for p in paths if (ROOT / p).exists() or (ROOT / "vitsweep" / p).exists()}

    assert len(paths) > 3
    assert paths == there


@pytest.mark.full
def test_the_lines_of_the_analysis_readme_run_on_the_sample(tmp_path: Path) -> None:
    text = (ROOT / "analysis" / "README.md").read_text(encoding="utf-8")
    [lines] = blocks("python", text)
    sample = str(ROOT / "analysis" / "sample")
    for printed in ("results/vit_nano-precision-sharding", "results/meta_gpu_scaling"):
        assert f'"{printed}"' in lines
        lines = lines.replace(printed, sample)

    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
