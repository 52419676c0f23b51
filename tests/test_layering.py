"""Imports point downwards only, and what plans a sweep loads no torch."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from vitsweep import extras

HOUSE = Path(__file__).parents[1]
PACKAGE, PLUGINS, CONF = HOUSE / "vitsweep", HOUSE / "hydra_plugins", HOUSE / "conf"

GROUND = (
    "errors", "words", "console", "job_environment", "files", "interpreters", "__init__", "foreign",
    "torch_compat", "control_group", "spec",
)  # fmt: skip
"""Each may import those before it."""
MAKING = (
    ("cell",),
    ("proof",),
    ("parallelize",),
    ("training",),
    ("measure",),
    ("techniques", "data"),
    ("objectives",),
    ("model",),
    ("rates",),
    ("collectives",),
    ("world",),
)
"""What turns a spec into samples, highest first; rooms of one line never import one another."""
READING = (("report",), ("charts",), ("tables",), ("results",))
"""What turns records into pages, highest first; it knows nothing of what made them."""
OURS = re.compile(r"^(from|import) (vitsweep|hydra_plugins)\b")
FIGURES = {"vitsweep.rates.profile"}
"""What is known of devices, without torch: for readers of records too."""
COMMANDING = (
    ("hydra_plugins", "__main__"),
    ("extras",),
    ("cli",),
    ("api",),
    ("launchers",),
    ("planning",),
    ("composition", "execution"),
)
"""What stands above both."""

DOOR = "vitsweep.extras"
"""The registry of optional features, which all may read; a feature's modules are for those that need it."""

WITHOUT_TORCH = {room for line in READING for room in line} | {*GROUND, "__main__", "composition"}
WITH_HYDRA = {"hydra_plugins", "composition"}


def allowed(room: str) -> set[str]:
    """Rooms that a room may import from, itself included."""
    lines = [line for line in (*COMMANDING, *MAKING, *READING) if room in line]
    if not lines:
        return {*GROUND[: GROUND.index(room) + 1]}
    [own] = lines
    if own in COMMANDING:
        below = COMMANDING[COMMANDING.index(own) + 1 :] + MAKING + READING
    else:
        chain = MAKING if own in MAKING else READING
        below = chain[chain.index(own) + 1 :]
    return {room, *GROUND} | {other for line in below for other in line}


def files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *PLUGINS.rglob("*.py")])


def name_of(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def room_of(path: Path) -> str:
    """First folder (or module) inside the package; the plugins are one room."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return parts[0] if parts[0] == "hydra_plugins" else parts[1]


@cache
def imports(path: Path, *, at_once: bool = False) -> frozenset[str]:
    """Modules that a file imports when it runs, or with `at_once` when it is loaded."""
    return frozenset(_imports(ast.parse(path.read_text()), at_once))


def _imports(node: ast.AST, at_once: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if at_once and isinstance(child, (ast.FunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports name the whole path"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, at_once)


def imports_any(path: Path, *packages: str, at_once: bool = False) -> list[str]:
    found = imports(path, at_once=at_once)
    return sorted(module for module in found if module.split(".")[0] in packages)


def target_files() -> dict[str, Path]:
    """`_target_` -> the file it names, for every YAML of conf/."""
    nodes = {path: yaml.safe_load(path.read_text()) for path in CONF.rglob("*.yaml")}
    targets = {node["_target_"] for node in nodes.values() if "_target_" in node}
    return {t: HOUSE / (t.rpartition(".")[0].replace(".", "/") + ".py") for t in targets}


def test_every_room_has_its_row_in_the_table() -> None:
    known = {room for line in (*COMMANDING, *MAKING, *READING) for room in line} | {*GROUND}
    assert {room_of(path) for path in files()} - {"__init__"} <= known


def test_imports_point_downwards_only() -> None:
    upwards = {name_of(path): found for path in files() if (found := _not_allowed(path))}
    assert upwards == {}


def _not_allowed(path: Path) -> set[str]:
    ours = {module for module in imports(path) if module.startswith("vitsweep.")}
    ours = {module for module in ours if not of_the_door(module, feature_of(path))}
    if any(room_of(path) in line for line in READING):
        ours = {module for module in ours if module.rpartition(".")[0] not in FIGURES}
    return {m for m in ours if m.split(".")[1] not in allowed(room_of(path)) - {"extras"}}


def feature_of(path: Path) -> str:
    """Name of the optional feature that a file belongs to, or ""."""
    parts = path.relative_to(PACKAGE).parts if path.is_relative_to(PACKAGE) else ()
    return parts[1] if len(parts) > 2 and parts[0] == "extras" else ""


def of_the_door(module: str, feature: str) -> bool:
    """Whether a module is the registry, or one of the feature itself or of those that it needs."""
    own = {feature, *extras.KNOWN[feature].needs} if feature else set()
    inside = module.removeprefix(DOOR).strip(".").split(".")[0]
    return module.startswith(DOOR) and (inside not in extras.KNOWN or inside in own)


def test_what_reads_records_and_what_is_asked_needs_no_torch() -> None:
    quiet = [path for path in files() if room_of(path) in WITHOUT_TORCH]
    assert {room_of(path) for path in quiet} == WITHOUT_TORCH
    quiet += [(HOUSE / module.replace(".", "/")).with_suffix(".py") for module in FIGURES]
    assert {name_of(path): found for path in quiet if (found := imports_any(path, "torch"))} == {}


def test_only_composition_the_plugins_and_one_file_of_the_command_line_know_hydra() -> None:
    found = {path for path in files() if imports_any(path, "hydra", "omegaconf")}
    assert {room_of(path) for path in found} == {*WITH_HYDRA, "cli"}
    assert [path.name for path in found if room_of(path) == "cli"] == ["hydra_detour.py"]


def test_choices_are_loaded_without_what_only_running_them_needs() -> None:
    heavy = ("torch", "torchao", "sklearn", "PIL")
    loaded = {t: imports_any(path, *heavy, at_once=True) for t, path in target_files().items()}
    assert len(loaded) > 20
    assert {target: found for target, found in loaded.items() if found} == {}


def test_the_walk_sees_imports_inside_functions_but_none_for_types(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import json\n"
        "if TYPE_CHECKING:\n    import pandas\n"
        "class Choice:\n    import numpy\n    def apply(self):\n        from torch import nn\n"
    )
    assert imports_any(path, "json", "numpy", "torch", "pandas", at_once=True) == ["json", "numpy"]
    assert set(imports_any(path, "torch", "pandas")) == {"torch.nn"}


PLANNING = """
from vitsweep.spec.resources import Machine
from vitsweep.composition.composer import Composer
from vitsweep.planning.sweep_plan import plan_cell
machine = Machine(device="cuda", cores_per_node=64, devices_per_node=8)
entry = plan_cell(Composer().compose(["precision=O2", "sharding=fsdp"]), machine)
assert not entry.reasons and len(entry.cell_id) == 12
"""
HELP = """
from vitsweep.cli import VERBS
assert all(verb.parser().format_help() for verb in VERBS.values())
"""
EVERY_TARGET = f"""
from vitsweep.spec.from_yaml import target_class
for target in {sorted(t for t in target_files() if t.startswith("vitsweep."))}:
    target_class({{"_target_": target}}, "choice")
"""


@pytest.mark.parametrize(
    "code",
    [
        "import vitsweep.spec.from_yaml",
        "from hydra_plugins.vitsweep_launchers import plugin",
        "import vitsweep.__main__, vitsweep.cli.main",
        "import vitsweep.report.html",
        EVERY_TARGET,
        PLANNING,
        HELP,
    ],
    ids=["from_yaml", "plugins", "front_door", "report", "every_target", "planning_a_cell", "help"],
)
def test_torch_is_not_loaded_by(code: str) -> None:
    shown = "\nimport sys; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code + shown], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_collecting_a_sweep_loads_neither_hydra_nor_what_plans(tmp_path: Path) -> None:
    folder = shutil.copytree(HOUSE / "analysis" / "sample", tmp_path / "sample")
    code = f"from vitsweep.cli import VERBS; VERBS['collect'].run([{str(folder)!r}])"
    planning = {"hydra", "vitsweep.composition", "vitsweep.planning"}
    shown = f"\nimport sys; print(sorted({planning} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code + shown], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_only_one_file_of_the_product_knows_scipy() -> None:
    found = {name_of(path) for path in files() if imports_any(path, "scipy")}
    assert found == {"vitsweep/tables/stats.py"}


MOST_INSIDE_FUNCTIONS = 120
"""Imports of our own: those of torch by techniques, and what no refused command should wait for."""


def test_imports_stand_at_the_top_of_a_file_unless_loading_them_costs() -> None:
    found = {name_of(path): num for path in files() if (num := num_inside_functions(path))}
    assert sum(found.values()) <= MOST_INSIDE_FUNCTIONS, found


def num_inside_functions(path: Path) -> int:
    """Count imports of our own that run when a function does."""
    inside: set[ast.AST] = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.Lambda)):
            inside |= {n for n in ast.walk(function) if isinstance(n, (ast.Import, ast.ImportFrom))}
    return sum(OURS.search(ast.unparse(node)) is not None for node in inside)


def test_the_contract_of_launchers_knows_no_scheduler() -> None:
    asked, known = ["vitsweep.launchers.base"], set[str]()
    while asked:
        known.add(module := asked.pop())
        path = (HOUSE / module.replace(".", "/")).with_suffix(".py")
        found = imports(path, at_once=True) if path.exists() else ()
        asked += {m.rpartition(".")[0] for m in found} - known
    assert "vitsweep.results.store" in known
    assert not [m for m in known if m.startswith("vitsweep.launchers.slurm")]
