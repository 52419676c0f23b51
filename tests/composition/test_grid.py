"""Which cells a command line asks for."""

import json
import re
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from tests.cells import GPU_NODE, LAPTOP
from tests.cells import composer as shared
from tests.composition import small_conf
from tests.refusals import require
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import baseline_of, expand
from vitsweep.composition.hydra import value_override
from vitsweep.errors import BadValueError
from vitsweep.planning.sweep_plan import plan_cell, plan_of
from vitsweep.spec.cell_spec import identity
from vitsweep.spec.menu import conf_dir

TEXTS = ("O1", "null", "True", "3", "1e3", "", " a ", "a, b=c", 'it\'s "so"', "\\", "a\\'")
TEXTS += ("x?", "nan", "a:b", "/p/q.yaml", "range(1,3)")


@pytest.fixture(scope="module")
def composer() -> Composer:
    return shared()


@pytest.fixture
def small(tmp_path: Path) -> Composer:
    return small_conf.composer(tmp_path)


def asked(overrides: list[str], composer: Composer) -> list[tuple[str, ...]]:
    return [cell.overrides for cell in expand(overrides, composer)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=O1,O2", "sharding=ddp,fsdp"],
        ["precision=glob(O*,exclude=O3)", "seed=range(0,6,2)", "memory=keep_all"],
        ["precision=choice(O1,O2)", "optimizer.weight_decay=sort(0.3,0.1)", "seed=1"],
        ["batch.images_per_step=range(16,64,16)", "+precision.note='a, b','c d'"],
        ["++optimizer.learning_rate=1e-3,1e-4", "seed=3,4", "seed=5,6", "resources.nodes=1,2"],
        ["optimizer.weight_decay=range(0.1,0.4,0.1)", "batch=base,blog_560"],
    ],
)
def test_cells_come_as_from_hydras_own_sweeper(overrides: list[str], composer: Composer) -> None:
    [expected] = BasicSweeper.split_arguments(composer.parse(overrides), None)
    assert asked(overrides, composer) == [tuple(cell) for cell in expected]


def test_a_cell_asked_for_twice_is_one(composer: Composer) -> None:
    listed = ["precision=O1", "precision=O2", "precision=O1"]
    cells = asked([f"++sweep.cells={listed}"], composer)
    assert [cell[0] for cell in cells] == ["precision=O1", "precision=O2"]


def test_equal_cells_of_a_named_sweep_are_one_whatever_their_choices_are_called(
    composer: Composer,
) -> None:
    typed = ["+sweep=meta_speedups", "batch.images_per_step=64", "batch.resolution_px=224"]
    plan = plan_of(expand(typed, composer), LAPTOP, composer)
    alone = [json.dumps(identity(entry.spec)) for entry in plan.entries.values()]
    nameless = {re.sub(r'"name": "[^"]*"', "", text) for text in alone}
    assert len(nameless) == len(alone) == len(set(alone)) > 8
    [baseline] = {*plan.baselines.values()}
    assert plan.entries[str(baseline)].composed.choices["batch"] == "base"


def test_hydras_own_settings_are_no_part_of_a_cell(composer: Composer) -> None:
    assert asked(["hydra/launcher=slurm", "hydra.launcher.mem_gb=2", "seed=1"], composer) == [
        ("seed=1",)
    ]


def test_a_value_may_belong_to_a_swept_choice(composer: Composer) -> None:
    cells = expand(["precision=O1,O2", "precision.loss_scale=128"], composer)
    assert [cell.tree["precision"]["loss_scale"] for cell in cells] == [128, 128]


def test_zipped_axes_advance_together(composer: Composer) -> None:
    overrides = [
        "sweep.zip=[batch.images_per_step,batch.resolution_px]",
        "batch.images_per_step=64,32",
        "precision=O1,O2",
        "batch.resolution_px=8,16",
    ]
    assert asked(overrides, composer) == [
        ("batch.images_per_step=64", "batch.resolution_px=8", "precision=O1"),
        ("batch.images_per_step=64", "batch.resolution_px=8", "precision=O2"),
        ("batch.images_per_step=32", "batch.resolution_px=16", "precision=O1"),
        ("batch.images_per_step=32", "batch.resolution_px=16", "precision=O2"),
    ]


def test_a_named_sweep_multiplies_with_the_command_line(small: Composer) -> None:
    cells = asked(["+sweep=ladder", "list=[3]", "nothing=1,2"], small)
    assert len(cells) == 2 * 2 * 2 * 2
    assert cells[0] == (
        "precision=half",
        "seed=0",
        "model=small",
        "list=[3]",
        "nothing=1",
        "sweep.name=ladder",
    )
    assert "precision.scale=static" in cells[-1]


def test_the_command_line_replaces_what_a_named_sweep_says(small: Composer) -> None:
    cells = asked(
        ["+sweep=ladder", "model=based", "seed=5", "precision=plain", "sweep.cells=[]"], small
    )
    assert cells == [("seed=5", "model=based", "precision=plain", "sweep.name=ladder")]


def test_a_cell_says_more_than_an_axis_and_the_command_line_more_than_both(
    composer: Composer,
) -> None:
    named = [
        "++sweep.axes={batch.images_per_step:[32],batch.resolution_px:[8,16]}",
        "sweep.cells=['precision=O1','precision=O2 batch.images_per_step=64']",
    ]

    def images(*typed: str) -> list[tuple[int, int]]:
        trees = [cell.tree["batch"] for cell in expand([*named, *typed], composer)]
        return [(batch["images_per_step"], batch["resolution_px"]) for batch in trees]

    assert images() == [(32, 8), (32, 16), (64, 8), (64, 16)]
    assert images("batch.images_per_step=5") == [(5, 8), (5, 16), (5, 8), (5, 16)]


def test_a_cell_of_a_named_sweep_can_be_typed_again(small: Composer) -> None:
    for cell in expand(["+sweep=ladder", "nothing=1,2", "sweep.zip=[[seed,nothing]]"], small):
        assert [again.tree for again in expand(cell.overrides, small)] == [cell.tree]


def test_every_named_sweep_expands_into_a_folder_of_its_name(composer: Composer) -> None:
    for path in sorted((conf_dir() / "sweep").glob("*.yaml")):
        cells = expand([f"+sweep={path.stem}"], composer)
        assert len(cells) > 1
        assert {cell.tree["sweep"]["name"] for cell in cells} == {path.stem}
        assert cells[0].tree["sweep"]["question"]
        fewest = min(cell.tree["measurement"]["blocks"] for cell in cells)
        assert fewest >= 5 or "# One block: " in path.read_text()


def on_a_cluster(path: Path) -> list[str]:
    """The overrides that the comment of a named sweep says to add, empty where it names another."""
    comment = " ".join(re.findall(r"^# (.*)", path.read_text(), re.MULTILINE))
    found = re.search(r"(?:Cluster|GPU): add `([^`]*)`", comment)
    return found[1].split() if found else []


GROWN = [p for p in sorted((conf_dir() / "sweep").glob("*.yaml")) if on_a_cluster(p)]


def test_a_named_sweep_grows_to_a_cluster_as_its_comment_says(composer: Composer) -> None:
    for path in GROWN:
        cells = expand([f"+sweep={path.stem}", *on_a_cluster(path)], composer)
        assert len(cells) > 1
        refused = [cell for cell in cells if plan_cell(cell, GPU_NODE).reasons]
        says_so = "are left out and counted" in path.read_text()  # a race over whatever can run
        assert len(refused) < len(cells) / 2 if says_so else not refused


BLOG = [
    path.stem
    for pattern in ("meta_*.yaml", "optimizer_step*.yaml")
    for path in sorted((conf_dir() / "sweep").glob(pattern))
]


def test_every_cell_of_the_blogs_sweeps_and_its_baseline_can_run(composer: Composer) -> None:
    for name in BLOG:
        machine = GPU_NODE if name.endswith("_cluster") else LAPTOP
        cells = expand([f"+sweep={name}"], composer)
        baselines = [baseline for cell in cells if (baseline := baseline_of(cell, composer))]
        assert len(baselines) == len(cells)
        for asked_for in (*cells, *baselines):
            assert not plan_cell(asked_for, machine).reasons


@pytest.mark.parametrize("name", ["meta_speedups", "meta_speedups_cluster"])
def test_the_speedups_of_the_blog_have_one_baseline(name: str, composer: Composer) -> None:
    machine = GPU_NODE if name.endswith("_cluster") else LAPTOP
    cells = expand([f"+sweep={name}"], composer)
    baselines = {
        plan_cell(found, machine).spec.cell_id: found.choices["batch"]
        for cell in cells
        if (found := baseline_of(cell, composer))
    }
    assert list(baselines.values()) == ["base"]
    own = {plan_cell(cell, machine).spec.cell_id for cell in cells}
    assert len(own - set(baselines)) == 16
    # the cluster's cell of float32 is another one over TF32 alone, which a known GPU has
    assert len(own & set(baselines)) == name.endswith("_cluster")


def test_a_mistake_is_named_as_typed(composer: Composer) -> None:
    for overrides, names in [
        (["seed=interval(0,1)"], "`seed=interval(0,1)`"),
        (["precision=glob(x*)"], "`precision=glob(x*)` `precision` `O0` `O1`"),
        (["seed=1,2,1,1"], "`seed=1` 3"),
        (["seed=range(3,3)"], "`seed=range(3,3)`"),
        (["hydra.launcher.nodes=1,2"], "`resources.nodes`"),
        (["sweep.name=a,b"], "`sweep.name`"),
        (["precision=O1,o2"], "`precision` `o2`"),
        (
            ["sweep.zip=[[seed,batch.images_per_step]]", "seed=1,2"],
            "`batch.images_per_step`",
        ),
        (["sweep.zip=[[seed,seed]]", "seed=1,2"], "`seed`"),
        (
            ["sweep.zip=[[seed,precision]]", "seed=1,2,3", "precision=O1,O2"],
            "`seed` `precision` 3 2",
        ),
        (["++sweep.axes={seed:[]}"], "`sweep.axes` `seed`"),
        (
            ["batch=base,blog_560", "batch.images_per_step=64"],
            "`batch=blog_560` `batch` `batch.images_per_step=64`",
        ),
        (
            ["optimizer=glob(adamw_*)", "optimizer.implementation=loop"],
            "`optimizer=adamw_fused` `optimizer` `optimizer.implementation=loop`",
        ),
    ]:
        with pytest.raises(BadValueError) as error:
            expand(overrides, composer)
        require(str(error.value), names)
    with pytest.raises(BadValueError, match="nightly"):
        expand(["+sweep=nightly"], composer)


def test_what_is_typed_is_read_back_as_it_was(composer: Composer) -> None:
    for value in [1, -2.5, True, None, [1, "a,b", [None]], {"a": "1", "b": {"c": [2]}}, *TEXTS]:
        [override] = composer.parse([value_override("key", value)])
        assert override.value() == value
        assert type(override.value()) is type(value)
        assert not override.is_sweep_override()


def test_a_range_that_python_refuses_is_named() -> None:
    with pytest.raises(BadValueError, match=r"`model.depth=range\(2,9,0\)`"):
        expand(["model.depth=range(2,9,0)"])
