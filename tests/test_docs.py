"""README and docs/: every command is one that vitsweep takes, and runs as printed unless marked."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from runpy import run_path

import pytest
import yaml

from tests.cells import LAPTOP
from tests.data.pictures import write_folder
from tests.documents import NOT_RUN, PAGES, ROOT, RUN_IN, Block, blocks, written
from tests.extras import ABSENT_FOLDERS, ABSENT_SETTINGS, ABSENT_VERBS
from vitsweep.cli import VERBS
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.hydra import open_loader
from vitsweep.launchers.slurm.submit.settings import settings_of
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import conf_dir

CODE = ("vitsweep", "hydra_plugins", "conf", "analysis", "benchmarks", "examples")

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
    "measurement/standard.yaml": ONE_STEP,
    "measurement/careful.yaml": ONE_STEP,
    "measurement/smoke.yaml": ONE_STEP,
    "batch/base.yaml": {"images_per_step": 16},
    "batch/blog_560.yaml": {"images_per_step": 4},
    "task/train.yaml": {"epochs": 1, "warmup_epochs": 0},
    "model/vit_nano.yaml": {"depth": 1},
    "model/vit_small.yaml": ONE_BLOCK,
    "model/vit_base.yaml": ONE_BLOCK,
    "model/video_vit_nano.yaml": {"depth": 2},
}
"""Settings of the copied conf/ that make each printed command take seconds."""

INSTALLS = ("make sweep", "make test", "make docs")
"""Commands that install into .venv and run for minutes: CI runs them."""

FIRST = "python -m vitsweep -m precision=O1,O2 sharding=ddp,fsdp"
"""The sweep whose results many pages read."""

EXIT_CODES = {
    "vitsweep gate": 1,  # one block per cell is too few to judge
}
"""Part of a command -> its exit code with these settings on this machine, where that is not 0."""

OF_READERS_PROJECT = "my_project/"
OF_READER = ("data=image_folder", "model=timm", "model=transformers", "=my_package.")
"""Parts of commands that need a folder or a package of the reader's."""


def test_a_block_that_is_not_run_says_why() -> None:
    marked = [block for block in blocks("bash", "python", "yaml") if block.mark]
    assert {block.mark for block in marked} <= {NOT_RUN, RUN_IN}
    assert all(len(b.said) > 15 for b in marked if b.mark == NOT_RUN)
    assert all((ROOT / b.said).is_dir() for b in marked if b.mark == RUN_IN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_one_that_vitsweep_takes(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verbs and options are parsed; cells are composed, typed and checked at full size."""
    _write_files(tmp_path, OF_READERS_PROJECT)
    for folder in (tmp_path, *(ROOT / "examples").iterdir()):
        monkeypatch.syspath_prepend(folder)
    for block in blocks("bash"):
        if block.page == page:
            for command in block.commands:
                _check(command, block)


def _write_files(folder: Path, below: str = "") -> None:
    """Write the files that the pages tell the reader to write."""
    for block in blocks("python", "yaml"):
        if block.file.startswith(below) and block.file:
            (folder / block.file).parent.mkdir(exist_ok=True)
            (folder / block.file).write_text(block.text)


def _check(command: str, block: Block) -> None:
    words = shlex.split(command.split("&&")[-1], comments=True)
    if words[:3] != ["python", "-m", "vitsweep"] or words[3] in ABSENT_VERBS:
        return
    if any(word.startswith(ABSENT_SETTINGS) for word in words):
        return
    overrides = _overrides(words[3:])
    if not overrides:
        return
    config_dir = ""
    if "--config-dir" in overrides:
        place = overrides.index("--config-dir")
        config_dir = str(ROOT / block.said / overrides.pop(place + 1))
        overrides.pop(place)
    texts = [word for word in overrides if word != "-m" and not word.startswith("hydra")]
    cells = expand(_without_files(texts), _composer(config_dir))
    if any(part in command for part in OF_READER):
        assert cells, command
    else:
        reasons = [plan_cell(cell, LAPTOP).reasons for cell in cells[:8]]
        assert not all(reasons), f"{command}: {reasons}"


def _overrides(words: list[str]) -> list[str]:
    """Return the overrides of a command; its verb parses the rest, and refuses what it does not know."""
    verb = VERBS.get(words[0])
    if verb is None:
        return words
    if verb.name == "plan":
        place = words.index("--config-dir") if "--config-dir" in words else len(words)
        mine, config_dir = words[1:place] + words[place + 2 :], words[place : place + 2]
        return [*verb.parser().parse_intermixed_args(mine).overrides, *config_dir]
    options = verb.parser().parse_intermixed_args(words[1:])
    if verb.name == "compare":
        a, b, *common = options.settings
        return [*(a or b).split(), *common]
    return []


def _without_files(texts: list[str]) -> list[str]:
    """Leave out choices that the pages tell the reader to write."""
    files = [Path(block.file) for block in blocks("yaml") if block.file]
    described = {f"{file.parent.name}={file.stem}" for file in files}
    return [text for text in texts if text.lstrip("+") not in described]


@cache
def _composer(config_dir: str) -> Composer:
    return Composer(open_loader(conf_dir(), config_dir or None))


def test_the_cluster_profiles_of_the_pages_are_profiles() -> None:
    profiles = [b for b in blocks("yaml") if b.page.parent.name == "cluster"]
    plain = yaml.safe_load((conf_dir() / "hydra/launcher/slurm.yaml").read_text())
    for profile in profiles:
        fields = plain | yaml.safe_load(profile.text)
        for not_a_field in ("defaults", "_target_"):
            fields.pop(not_a_field)
        fields["site"] = plain["site"] | fields["site"]
        assert settings_of(fields)
    assert len(profiles) >= 4


def test_the_table_of_a_technique_has_every_choice_and_no_other() -> None:
    """What it does to memory, bytes and FLOPs, and when to use it; its YAML says what it is."""
    missing, unknown = [], []
    for group in GROUPS:
        page = ROOT / "docs" / "techniques" / f"{group}.md"
        text = written(page) if page.exists() else ""
        choices = [path.stem for path in (conf_dir() / group).glob("*.yaml")]
        missing += [f"{group}={c}" for c in choices if f"`{c}`" not in text]
        cells = re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE)
        names = re.findall(r"`(\w+)[` ]", "".join(cells))
        unknown += [f"{group}={name}" for name in names if name not in choices]
    assert (missing, unknown) == ([], [])


def test_the_tables_made_from_the_code_are_current() -> None:
    """`make fix` writes them anew."""
    tables = run_path(str(ROOT / "docs" / "tables.py"))
    old = [p.name for p in PAGES[1:] if tables["current"](text := p.read_text("utf-8")) != text]
    assert set(old) <= ({"commands.md"} if ABSENT_VERBS else set())


LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)")


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "slurm/README.md", "analysis/README.md"]
)
def test_every_path_and_link_of_a_document_exists(document: str) -> None:
    """Links within docs/ are checked where the site is built (`make check`)."""
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), f"{target}#{anchor}"
    assert _missing(text, path.parent) == set()


def test_every_path_that_a_page_names_exists() -> None:
    for page in PAGES[1:]:
        assert _missing(written(page), ROOT) == set()


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def _missing(text: str, folder: Path) -> set[str]:
    """Return the paths in backticks that are neither in a folder nor in the repository."""
    quoted = re.findall(r"`((?:\.?[\w-]+/)+[\w.-]*)`", text)
    meant = {
        p
        for p in quoted
        if not p.removeprefix("vitsweep/").startswith(ABSENT_FOLDERS)
        and not re.search(
            r"^(cells|jobs|code)/|NAME|GROUP|VERB|SWEEP|NVIDIA|img/s|results/|site/|/data/", p
        )
    }
    roots = (folder, ROOT, ROOT / "vitsweep", ROOT / "examples" / "own_model")
    described = {block.file for block in blocks("python", "yaml")}
    return {p for p in meant - described if not any((root / p).exists() for root in roots)}


def exit_code(command: str) -> int:
    return next((code for part, code in EXIT_CODES.items() if part in command), 0)


def merged(old: dict, new: dict) -> dict:
    return {**old, **{k: merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items()}}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code whose settings are small, with the pages' own files, and a `.venv` to activate."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, smaller in SMALLER.items():
        path = folder / "conf" / name
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), smaller)))
    config = folder / "conf" / "config.yaml"  # its comments describe the groups: they stay
    config.write_text(re.sub(r"\bmost: \w+", "most: 32", config.read_text()))
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    write_folder(folder / "pictures")
    _write_files(folder)
    assert run(FIRST, folder).returncode == 0
    return folder


def run(command: str, checkout: Path, folder: str = ".") -> "subprocess.CompletedProcess[str]":
    """Type a command after `. .venv/bin/activate`; comparisons and races end after few blocks."""
    command = command.replace("/data/imagenet", str(checkout / "pictures"))
    if " compare " in command:
        command += " --minutes 0.01"
    command = re.sub(r"sweep\.minutes=\d+", "sweep.minutes=1", command)
    return subprocess.run(
        ["bash", "-c", f". {checkout}/.venv/bin/activate; {command}"],
        cwd=checkout / folder,
        env=os.environ | {"PYTHONPATH": str(checkout), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def script(block: Block) -> list[str]:
    """Return what a block runs: each line of a shell block, a Python block as a whole."""
    if block.language == "python":
        return [f"python - <<'END'\n{block.text}\nEND"]
    return [
        c
        for c in block.commands
        if not c.startswith(INSTALLS) and not ABSENT_VERBS & {*c.split()[3:4]}
    ]


RUNNING = sorted({b.page for b in blocks("bash", "python") if b.mark != NOT_RUN and not b.file})


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_as_printed(page: Path, checkout: Path) -> None:
    """One after the other in one folder: later commands read what earlier ones measured."""
    typed = dict.fromkeys(
        (command, block.said if block.mark == RUN_IN else ".")
        for block in blocks("bash", "python")
        if block.page == page and block.mark != NOT_RUN and not block.file
        for command in script(block)
    )
    ended = {command: run(command, checkout, folder) for command, folder in typed}

    wrong = {
        command: done.stdout + done.stderr
        for command, done in ended.items()
        if done.returncode != exit_code(command) or "Traceback" in done.stderr
    }
    assert not wrong, "\n\n".join(f"$ {c}\n{text}" for c, text in wrong.items())


@pytest.mark.full
def test_the_lines_of_the_analysis_readme_run_on_the_sample(tmp_path: Path) -> None:
    text = (ROOT / "analysis" / "README.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    sample = str(ROOT / "analysis" / "sample")
    for printed in ("results/vit_nano-precision-sharding", "results/meta_gpu_scaling"):
        assert f'"{printed}"' in lines
        lines = lines.replace(printed, sample)

    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
