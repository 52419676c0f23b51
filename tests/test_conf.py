"""Every YAML of conf/ composes and runs a tiny cell, or is refused with the reason that stands here."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import vitsweep
from tests.cells import THIS_LAPTOP, TINY, composer, entry
from tests.data.pictures import write_folder
from tests.ranks import RankFailedError, on_ranks, placed
from vitsweep.measure.summarize import Summary
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Resources
from vitsweep.spec.technique import Technique
from vitsweep.techniques.runtime.process import numa_nodes
from vitsweep.world import World

ON_CPU = ["resources.device=cpu", "resources.threads_per_rank=1"]
ROOMS = set(GROUPS) - {"schedule"}
"""Groups whose choices have code of their own; `schedule` has one choice, the kind itself."""
ONE_STEP = [
    "measurement=smoke",
    "measurement.warmup_steps=0",
    "measurement.measured_steps=1",
    "measurement.warmup_min_seconds=0",
    "measurement.min_seconds=0",
]
SHORT = [
    "measurement.warmup_steps=0",
    "measurement.warmup_min_seconds=0",
    "measurement.measured_steps=1",
    "measurement.min_seconds=0",
    "measurement.phase_steps=1",
]
TRAINED = ["task.epochs=1", "batch.images_per_step=256"]
"""Few large steps."""
RECIPES = ("deit_300", "digits", "pycls_100", "short_20")
VIDEO = ["model=video_vit_nano", "data=moving_digits"]

SMALL_VIT = (
    "{{hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64,patch_size:4}}"
)
OF_USERS = ("model=module", "model=timm", "model=transformers")
"""Models without the keys of ours."""

REFUSED_ON_CPU = {
    **({} if find_spec("timm") else {"model=timm": "`pip install 'vitsweep[timm]'`"}),
    "attention=flex": "needs `resources.device=cuda`",
    "attention=sdpa_cudnn": "needs `resources.device=cuda`",
    "attention=sdpa_cudnn_first": "needs `resources.device=cuda`",
    "attention=sdpa_efficient": "needs `resources.device=cuda`",
    "precision=fp8": "needs a GPU with FP8 units",
    "precision=mxfp8": "needs a GPU with FP8 units",
    "precision=fp8_masters": "needs a GPU with FP8 units",
    "precision=tf32": "needs an NVIDIA GPU",
    **({} if len(numa_nodes()) > 1 else {"runtime=bind_numa": "needs several NUMA nodes"}),
}
"""Choice -> part of its reason. Everything else must run here."""

SLOW = {
    **{f"recipe={name}": pytest.mark.full for name in RECIPES if name != "digits"},
    "compilation=compile_blocks": pytest.mark.full,  # tests/techniques/compilation
    "compilation=compile_model": pytest.mark.full,
}
"""Choices that take long, and where they are tested besides."""

PICTURES = ["data=image_folder", "data.folder={pictures}", "batch.resolution_px=8"]
DIFFUSED = (
    "model=stdit_nano",
    "objective=flow_matching",
    "data.num_frames=2",
    "batch.resolution_px=8",
)
BESIDE = {
    "data=image_folder": [*PICTURES, "data.num_workers=0"],
    "loader=decoded_cache": [*PICTURES, "data.num_workers=0", "loader.folder={pictures}/decoded"],
    "data=module": [
        "data.target=tests.user_data.MapStyle",
        "data.num_channels=1",
        "data.num_workers=0",
        "batch.resolution_px=8",
    ],
    "data=moving_digits": VIDEO,
    "data=synthetic": ["batch.resolution_px=8", "data.num_distinct=16"],
    "data=synthetic_video": [*VIDEO, "batch.resolution_px=8"],
    "attention=sdpa_causal": ["classifier=pooled"],
    "batch=blog_384_256px": ["batch.images_per_step=384", "batch.resolution_px=8"],
    "batch=blog_560": ["batch.images_per_step=560"],
    "measurement=careful": SHORT,
    "measurement=standard": SHORT,
    "objective=module": ["objective.target=tests.user_modules.focal"],
    "model=module": ["model.target=tests.user_modules.build"],
    "model=timm": ["model.name=vit_tiny_patch16_224"],
    "model=transformers": ["model.name=vit", f"++model.arguments={SMALL_VIT}"],
    "data=synthetic_latents": [*DIFFUSED, "data.text_vectors=3", "data.text_width=8"],
    "model=stdit_nano": [*DIFFUSED, "data=moving_digits"],
    "model=stdit_720m": [*DIFFUSED[1:], "data=moving_digits"],
    "model=stdit_1b": [*DIFFUSED[1:], "data=moving_digits"],
    "model=stdit_3b": [*DIFFUSED[1:], "data=moving_digits"],
    "model=dit_nano": ["objective=flow_matching", "batch.resolution_px=4"],
    "model=dit_xl_2": ["objective=flow_matching", "batch.resolution_px=4"],
    "objective=flow_matching": ["model=dit_nano", "batch.resolution_px=4"],
    "objective=lejepa": ["objective.projector_width=64"],
    "objective=masked_autoencoder": [
        "objective.decoder_width=64",
        "objective.decoder_heads=4",
    ],
    "objective=self_distillation": ["objective.prototypes=256", "objective.head_width=64"],
    "model=axial_vit_base": ["batch.resolution_px=32"],
    "model=video_vit_3b": VIDEO,
    "model=video_vit_720m": VIDEO,
    "model=video_vit_nano": VIDEO,
    "sequence_parallel=dsp": VIDEO,
    "sequence_parallel=lasp": ["attention=linear", "attention.causal=true", "classifier=pooled"],
    "sequence_parallel=lasp2": ["attention=linear"],
    "sequence_parallel=usp": ["resources.ranks_per_node=4"],
    "sharding=hsdp": ["resources.ranks_per_node=4"],
    "sharding=none": ["resources.ranks_per_node=1"],
    "task=train": TRAINED,
    **{f"recipe={name}": ["task=train", *TRAINED] for name in RECIPES},
}
"""What a choice needs beside it to run as a tiny cell."""

OVER_RANKS = ("averaging", "precision", "recipe", "sharding", "task")
"""Groups besides those that share a model whose choices do something else on two ranks than on one.

What the others do over ranks is in their rooms' tests and, pair by pair, in tests/test_equivalence.py.
"""


def yamls(*, of_cells: bool = False) -> list[Path]:
    """All files of conf/ below a group; `of_cells` leaves out Hydra's own groups and named sweeps."""
    paths = sorted(conf_dir().glob("*/**/*.yaml"))
    apart = {"hydra", "sweep"}
    return [p for p in paths if not (of_cells and p.relative_to(conf_dir()).parts[0] in apart)]


def choice_of(path: Path) -> str:
    return f"{path.parent.relative_to(conf_dir())}={path.stem}"


CHOICES = [choice_of(path) for path in yamls(of_cells=True)]


@cache
def tiny(choice: str, pictures: Path) -> PlannedCell:
    """The smallest cell that holds a choice."""
    beside = [text.format(pictures=pictures) for text in BESIDE.get(choice, [])]
    two_patches = []
    if choice.startswith("model=") and not beside:
        side = (
            2
            * yaml.safe_load((conf_dir() / f"{choice.replace('=', '/')}.yaml").read_text())[
                "patch_px"
            ]
        )
        two_patches = [f"batch.resolution_px={side}"]
    group = choice.partition("=")[0]
    shared = group in OVER_RANKS or group.endswith("parallel")
    ranks = [] if shared else ["resources.ranks_per_node=1"]
    shape = [t for t in TINY if not (choice.startswith(OF_USERS) and t.startswith("model."))]
    return entry(
        *ON_CPU, *ranks, *shape, *ONE_STEP, *two_patches, *beside, choice, machine=THIS_LAPTOP
    )


def run_all(world: World, cells: list[CellSpec], folder: Path) -> list[Summary]:
    """Run cells of as many ranks one after the other, on meshes of their own."""
    from vitsweep.cell import RunContext, run_cell

    context = RunContext(proved="", folder=folder)
    return [run_cell(cell, placed(world, cell), context) for cell in cells]


class Runs:
    """Runs cells of as many ranks together, at the first question about one of them.

    Where one of them fails, each is run alone, so that only its own test fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.pictures = folder, write_folder(folder / "pictures")
        self._answers: dict[CellSpec, Summary] = {}
        self._alone = {self.cell(choice) for choice in SLOW}

    def of(self, choice: str) -> Summary:
        cell = self.cell(choice)
        if cell not in self._answers and cell not in self._alone:
            self._run_together(cell.resources)
        if cell not in self._answers:
            self.run([cell])
        return self._answers[cell]

    def cell(self, choice: str) -> CellSpec:
        return tiny(choice, self.pictures).spec

    def _run_together(self, resources: Resources) -> None:
        found = [tiny(choice, self.pictures) for choice in CHOICES]
        cells = dict.fromkeys(entry.spec for entry in found if not entry.reasons)
        same = [c for c in cells if c.resources == resources and c not in self._alone]
        try:
            self.run(same)
        except RankFailedError:
            self._alone |= set(same)

    def run(self, cells: list[CellSpec]) -> list[Summary]:
        ranks = cells[0].resources.world_size
        answers = on_ranks(ranks, run_all, cells[0], cells, self.folder, folder=self.folder)[0]
        self._answers |= dict(zip(cells, answers, strict=True))
        return answers


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("choices"))


def marked(choice: str) -> Any:
    if choice in SLOW:
        return pytest.param(choice, marks=SLOW[choice])
    return choice


@pytest.mark.parametrize("choice", [marked(c) for c in CHOICES if c not in REFUSED_ON_CPU])
def test_a_choice_runs_a_tiny_cell(choice: str, runs: Runs) -> None:
    found = tiny(choice, runs.pictures)
    assert not found.reasons
    assert found.composed.choices[choice.partition("=")[0]] == choice.partition("=")[2]
    summary = runs.of(choice)
    assert summary.metrics["images_per_second"] > 0
    assert summary.metrics["loss_last"] > 0
    assert summary.validity["steps_counted"] == 1
    assert len(summary.samples["step_time_ms"]) == found.spec.resources.world_size


@pytest.mark.parametrize("choice", REFUSED_ON_CPU)
def test_a_choice_is_refused_on_a_cpu_with_its_reason(choice: str, tmp_path: Path) -> None:
    reasons = tiny(choice, tmp_path).reasons
    assert REFUSED_ON_CPU[choice] in " ".join(reasons)
    assert all(reason.endswith(".") and "`" in reason for reason in reasons)


def test_the_tables_name_choices_that_exist() -> None:
    assert {*REFUSED_ON_CPU, *BESIDE, *SLOW} <= set(CHOICES)


def test_a_yaml_begins_with_a_comment_that_says_something() -> None:
    for path in yamls():
        first = path.read_text().splitlines()[0]
        assert first.startswith("# ")
        assert len(first) > 20


def test_the_name_of_a_file_is_the_name_of_its_choice() -> None:
    for path in yamls(of_cells=True):
        group, choice = choice_of(path).split("=")
        assert choice in composer().options(group)
        assert composer().compose([f"{group}={choice}"]).tree[group]["name"] == choice
        assert yaml.safe_load(path.read_text()).get("name") is None


def test_every_class_of_a_group_is_on_the_menu() -> None:
    for group in [*sorted(ROOMS), "data"]:
        written = {
            yaml.safe_load(p.read_text())["_target_"] for p in (conf_dir() / group).glob("*.yaml")
        }
        plain = {target for target in written if target.startswith("vitsweep.spec.")}
        assert len(plain) <= 1  # the kind itself
        assert (
            plain | {f"{kind.__module__}.{kind.__qualname__}" for kind in _classes(group)}
            == written
        )


def _classes(group: str) -> Iterator[type]:
    """Techniques that the modules of a group define, except what several of them derive from."""
    room = "vitsweep.data" if group == "data" else f"vitsweep.techniques.{group}"
    package = importlib.import_module(room)
    folders = getattr(package, "__path__", [])  # a small group is one module
    for name in [room, *(module.name for module in pkgutil.iter_modules(folders, f"{room}."))]:
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            own = (
                kind.__module__ == name and issubclass(kind, Technique) and kind.__name__[0] != "_"
            )
            if own and not inspect.isabstract(kind):
                yield kind


def test_every_group_of_techniques_has_a_room_and_a_menu() -> None:
    techniques = Path(vitsweep.__file__).parent / "techniques"
    rooms = {path.stem for path in techniques.iterdir()}
    menus = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert ROOMS <= rooms
    assert set(GROUPS) <= menus
