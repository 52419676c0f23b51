"""Cells assembled from pieces equal Hydra's own composition."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.composition import small_conf
from tests.refusals import require
from vitsweep.composition.composer import Composer, copy_tree
from vitsweep.composition.spelling import TEXTS
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import conf_dir

NO_TEXTS = ("7", "-1.5", "1e-4", "true", "inf")
WORDS = (*NO_TEXTS, "null", "auto", "'a, b=c'", '"it\'s"', "[1,2,[x]]", "''")
WORDS += ("'1'", "a b", "x\\,y", "'${seed}'", "0x1f", "a/b.c", "'null'")


def hydras_own(conf: Path, asked: Sequence[Sequence[str]]) -> list[Any]:
    """Compose with Hydra's public interface, or note that it refuses."""
    results: list[Any] = []
    with initialize_config_dir(str(conf), version_base="1.3"):
        for overrides in asked:
            try:
                config = compose("config", list(overrides))
                results.append(without_empty_name(OmegaConf.to_container(config, resolve=True)))
            except Exception:
                results.append("refused")
    return results


def ours(composer: Composer, overrides: Sequence[str]) -> Any:
    try:
        cell = composer.compose(overrides)
    except BadValueError:
        return "refused"
    return without_names(copy_tree(cell.tree), cell.choices)


def in_quotes(override: str) -> str:
    """Put a number in quotes where the setting is a text: Hydra reads it then as ours does without."""
    key, _, word = override.partition("=")
    return f"{key}='{word}'" if key.lstrip("+") in TEXTS and word in NO_TEXTS else override


def without_empty_name(tree: Any) -> Any:
    """Leave out the name of a model that a YAML file leaves open: ours is that of the choice then."""
    if isinstance(tree.get("model"), dict) and tree["model"].get("name", "") is None:
        del tree["model"]["name"]
    return tree


def without_names(tree: dict[str, Any], choices: Any) -> dict[str, Any]:
    for group, choice in choices.items():
        node: Any = tree
        for key in group.split("/"):
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and group != "sweep":
            assert node.pop("name") == choice
    return tree


class RandomCells:
    """Draws override lists over the real conf/."""

    def __init__(self, composer: Composer, seed: int) -> None:
        self.composer = composer
        self.draw = random.Random(seed)
        self.groups = list(composer.default_choices)

    def overrides(self) -> list[str]:
        picked = self.draw.sample(self.groups, self.draw.randint(0, 5))
        choices = {g: self.draw.choice(self.composer.options(g)) for g in picked}
        tree = self.composer.compose([f"{g}={c}" for g, c in choices.items()]).tree
        values = [self.value(tree) for _ in range(self.draw.randint(0, 3))]
        return self.draw.sample(
            texts := [f"{g}={c}" for g, c in choices.items()] + values, len(texts)
        )

    def value(self, tree: dict[str, Any]) -> str:
        group = self.draw.choice(self.groups)
        key = self.draw.choice(
            [k for k in tree[group] if k not in ("name", "_target_")] or ["none"]
        )
        if key == "none":
            return f"+{group}.added=1"
        return self.draw.choice(
            [
                f"{group}.{key}={self.text()}",
                f"++{group}.{key}={self.text()}",
                f"++{group}.added.deeper={self.text()}",
                f"+{group}.added={self.text()}",
                f"+{group}.added={{a:{self.text()},b:[1,x]}}",
                f"~{group}.{key}",
                f"seed={self.draw.randint(0, 9)}",
            ]
        )

    def text(self) -> str:
        return self.draw.choice(WORDS)


@pytest.mark.parametrize(
    ("seed", "cells"),
    [
        (0, 8),
        *(pytest.param(s, 60, marks=pytest.mark.full) for s in (1, 2, 3)),
    ],
)
def test_random_cells_of_the_real_menu_equal_hydras(seed: int, cells: int) -> None:
    composer = Composer()
    draws = RandomCells(composer, seed)
    asked = [draws.overrides() for _ in range(cells)]
    expected = hydras_own(conf_dir(), [[*map(in_quotes, overrides)] for overrides in asked])
    assert sum(tree != "refused" for tree in expected) > cells / 2
    for overrides, tree in zip(asked, expected, strict=True):
        assert ours(composer, overrides) == tree, overrides


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=large", "model.inner.a=5"],
        ["model=follows", "seed=3"],
        ["model=based", "model.depth=7"],
        ["model=everywhere"],
        ["model=void"],
        ["model=large", "head=two"],
        ["model.width=3", "head=two", "model=large"],
        ["data=fields", "data.from_primary=2"],
        ["precision=half", "precision.scale=1"],
        ["+experiment=wide", "model=large"],
        ["+experiment=wide", "precision=plain"],
        ["+experiment=wide", "model.width=1", "data=fields"],
        ["nested/kind=b", "nested.kind.x=9", "seed=1"],
        ["model={width:5}", "model.depth=3"],
        ["model.inner={a:9}", "model=large", "model.inner.b=[3]"],
        ["~model.inner", "+model.inner.c=1", "precision=half"],
        ["~precision", "seed=2"],
        ["~precision", "precision=half"],
        ["list=[]", "+nothing=3", "seed=null"],
        ["list=3", "nothing.deep=1"],
        ["list.0=5"],
        ["seed.deep=1"],
        ["++seed.deep=1"],
        ["+seed=1"],
        ["+model=large"],
        ["model@other=large"],
        ["+model@data.inner=large", "data=fields"],
        ["seed='${list}'"],
        ["model.inner='${seed}'", "model=large"],
        ["seed=1", "seed=2", "model=small", "model=large"],
        ["model=[small,large]"],
        ["model=null"],
        ["model=9"],
        ["nothing.key=1"],
        ["model.width.x=1"],
        ["hydra.job.name=x", "model=large"],
    ],
)
def test_what_is_not_local_is_left_to_hydra(tmp_path: Path, overrides: list[str]) -> None:
    composer = small_conf.composer(tmp_path)
    [expected] = hydras_own(tmp_path, [overrides])
    assert ours(composer, overrides) == expected


def test_a_thousand_cells_cost_one_composition() -> None:
    composer = Composer()
    for seed in range(250):
        for precision in ("fp32", "O1", "O2", "bf16"):
            composer.compose([f"precision={precision}", f"seed={seed}", "batch.images_per_step=64"])
    assert composer.compositions == 1


def test_what_is_not_local_is_composed_once_for_all_cells(tmp_path: Path) -> None:
    composer = small_conf.composer(tmp_path)
    for seed in range(50):
        for model in ("small", "large"):
            composer.compose(["head=two", f"model={model}", f"seed={seed}", "list=[1,{a:1}]"])
    assert composer.compositions <= 4


def test_cells_share_no_container(tmp_path: Path) -> None:
    composer = small_conf.composer(tmp_path)
    first, second = composer.compose(["seed=1"]), composer.compose(["seed=2"])
    first.tree["model"]["inner"]["b"].append(3)
    assert (
        second.tree["model"]["inner"]["b"]
        == composer.compose().tree["model"]["inner"]["b"]
        == [1, 2]
    )


def test_every_group_node_carries_its_choice(tmp_path: Path) -> None:
    cell = small_conf.composer(tmp_path).compose(["nested/kind=b", "model=void"])
    assert cell.tree["nested"]["kind"]["name"] == "b"
    assert cell.tree["model"]["name"] == "void"
    assert cell.choices["nested/kind"] == "b"


def test_a_mistake_is_named_as_typed() -> None:
    for typed, names in [
        (
            "precison=O1",
            "`precison` `precision=O1`",
        ),
        ("precision=o1", "`o1` `precision=O1`"),
        ("precision=3", "`precision=3` `precision` `3`"),
        ("precision=O1.yaml", "`precision` `O1.yaml`"),
        (
            "batch.image_per_step=3",
            "`image_per_step` `batch.images_per_step=3`",
        ),
        ("resources.ranks=2", "`resources.ranks_per_node=2`"),
        (
            "averaging.every=2",
            "`averaging=none` `every` `averaging=ema`",
        ),
        ("+precison=O1", "`+precison=O1` `precison`"),
        (
            "+seed=1",
            "`+seed=1` `seed=0` `+` `seed=1`",
        ),
        ("seed=[1", "`seed=[1`"),
    ]:
        with pytest.raises(BadValueError) as error:
            Composer().compose([typed])
        require(str(error.value), names)
    for typed, told in [  # Hydra's own words
        ("sweep=nightly", r"\+sweep=nightly"),
        ("modle/vit=a", "`modle/vit=a`"),
        ("+precision=O2", r"`\+precision=O2`"),
    ]:
        with pytest.raises(BadValueError, match=told):
            Composer().compose([typed])
