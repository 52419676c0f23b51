"""What a speedup divides by."""

import pytest

from tests.cells import composer as shared
from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.grid import baseline_of, expand
from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import GROUPS


@pytest.fixture(scope="module")
def composer() -> Composer:
    return shared()


def baseline(overrides: list[str], composer: Composer) -> ComposedCell:
    [cell] = expand(overrides, composer)
    found = baseline_of(cell, composer)
    assert found is not None
    return found


def test_every_technique_is_back_at_its_default_choice(composer: Composer) -> None:
    typed = [
        "precision=O2",
        "precision.master_weights=false",
        "sharding=fsdp",
        "mesh.shard=2",
        "layout=batch_second",
    ]
    found = baseline(typed, composer)
    for group in (*GROUPS, "mesh"):
        assert found.tree[group] == composer.compose().tree[group]


def test_what_is_matched_stays_the_cells_own(composer: Composer) -> None:
    typed = [
        "precision=O1",
        "model=vit_base",
        "batch.images_per_step=32",
        "resources.nodes=2",
        "seed=3",
    ]
    found = baseline([*typed, "measurement=smoke"], composer)
    assert found.choices["model"] == "vit_base"
    assert found.choices["measurement"] == "smoke"
    assert found.tree["batch"]["images_per_step"] == 32
    assert found.tree["resources"]["nodes"] == 2
    assert found.tree["seed"] == 3


def test_what_is_not_matched_is_at_its_default(composer: Composer) -> None:
    typed = ["precision=O1", "model=vit_base", "batch=blog_384_256px", "resources.nodes=2"]
    found = baseline([*typed, "sweep.match=[model]"], composer)
    assert found.choices["model"] == "vit_base"
    assert found.choices["batch"] == "base"
    assert found.tree["batch"] == composer.compose().tree["batch"]
    assert found.tree["resources"]["nodes"] == 1


def test_a_technique_may_be_matched(composer: Composer) -> None:
    found = baseline(["precision=O1", "sharding=fsdp", "sweep.match=[model,precision]"], composer)
    assert (found.choices["precision"], found.choices["sharding"]) == ("O1", "ddp")


@pytest.mark.parametrize(
    "setting",
    [
        "sweep.baseline={precision:O1,sharding:fsdp}",
        'sweep.baseline="precision=O1 sharding=fsdp"',
        "sweep.baseline=['precision=O1','sharding=fsdp']",
    ],
)
def test_another_baseline_can_be_asked_for(setting: str, composer: Composer) -> None:
    found = baseline(["precision=O2", "optimizer=adamw_fused", setting], composer)
    assert [found.choices[g] for g in ("precision", "sharding", "optimizer")] == [
        "O1",
        "fsdp",
        "adamw_loop",
    ]


def test_a_cell_can_be_its_own_baseline(composer: Composer) -> None:
    [cell] = expand(["precision=fp32", "seed=4"], composer)
    found = baseline_of(cell, composer)
    assert found is not None
    assert found.key == cell.key


def test_null_asks_for_none(composer: Composer) -> None:
    [cell] = expand(["precision=O2", "sweep.baseline=null"], composer)
    assert baseline_of(cell, composer) is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("sweep.baseline={precision:O9}", "`precision` has no choice `O9`"),
        ('sweep.baseline="precision=O1,O2"', "`sweep.baseline`: `precision=O1,O2`"),
        ("sweep.match=[batch.resolution_px]", "`batch.resolution_px`"),
        ("sweep.match=[modle]", "`sweep.match` names `modle`"),
        ("sweep.match=model", "`sweep.match=model`: "),
    ],
)
def test_a_mistake_is_named_as_typed(setting: str, told: str, composer: Composer) -> None:
    with pytest.raises(BadValueError) as error:
        baseline(["precision=O2", setting], composer)
    assert told in str(error.value)


@pytest.mark.parametrize("typed", ["foo", "{precision:O9}", "{precison:O1}"])
def test_a_wrong_baseline_is_named_as_typed(typed: str, composer: Composer) -> None:
    with pytest.raises(BadValueError) as error:
        baseline([f"sweep.baseline={typed}"], composer)
    assert "`sweep.baseline=" in str(error.value)
    assert "sweep.baseline={precision:O1,sharding:fsdp}" in str(error.value)
