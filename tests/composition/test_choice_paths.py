"""A choice is a file inside of a folder of the search path, whoever types it and whatever its name is."""

import os
import re
from pathlib import Path

import pytest

from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import baseline_of, expand
from vitsweep.composition.hydra import value_override
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import conf_dir, text_of


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one's own choices; beside it what is none."""
    text = text_of(conf_dir() / "model" / "vit_nano.yaml")
    for name in ("conf/model/mine", "conf/model/sub/deep", "team/code/m", "conf_evil/model/m"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "conf/model/outside.yaml").symlink_to(tmp_path / "team/code/m.yaml")
    (tmp_path / "conf/model/inside.yaml").symlink_to(tmp_path / "conf/model/mine.yaml")
    (tmp_path / "conf/model/linked").symlink_to(tmp_path / "team/code")
    (tmp_path / "conf/layout").mkdir()
    (tmp_path / "conf/layout/other.yaml").write_text("# @package tokens\nx: 1\n")
    return tmp_path


def paths_to(own: Path) -> list[str]:
    menu = os.path.relpath(own / "team/code/m", conf_dir() / "model")
    return [menu, f"sub/../{menu}", "../../team/code/m", "../../conf_evil/model/m", str(own / "team/code/m"),
            f"file://{own}/team/code/m", "outside", "linked/m", "../model/mine"]  # fmt: skip


def test_no_path_leads_out_of_the_search_path(own: Path) -> None:
    composer = Composer(hydra.open_loader(conf_dir(), own / "conf"))
    menu, *others = paths_to(own)
    keys = ("model", "+precision@model", "+sweep", "hydra/launcher", "+metric@model")
    words = [f"{key}={menu}" for key in keys] + [f"model={menu}.yaml", f"model=[vit_nano,{menu}]"]
    for word in [*words, *(f"model={path}" for path in others)]:
        with pytest.raises(BadValueError, match="`") as refused:
            composer.compose([word])
        assert word.partition("=")[0].lstrip("+") in str(refused.value)
    for key, value in {"++sweep.axes": {"model": menu}, "sweep.cells": [[f"model={menu}"]]}.items():
        with pytest.raises(BadValueError, match=re.escape(f"`{menu}`")):
            expand([value_override(key, value)], composer)
    [cell] = expand([value_override("sweep.baseline", {"model": menu})], composer)
    with pytest.raises(BadValueError, match=r"`sweep\.baseline"):
        baseline_of(cell, composer)


def test_names_of_ones_own_folder_stay(own: Path) -> None:
    (own / "link").symlink_to(own / "conf")
    (own / "conf/sweep").mkdir()
    text = "# @package _global_\ndefaults: [{override /layout: batch_second}]\n"
    (own / "conf/sweep/mine.yaml").write_text(text)
    composer = Composer(hydra.open_loader(conf_dir(), own / "link"))
    for name in ("mine", "sub/deep", "inside", "vit_tiny"):
        assert composer.compose([f"model={name}"]).tree["model"]["width"]
    assert composer.compose(["+sweep=mine"]).choices["layout"] == "batch_second"
    assert composer.compose(["layout=other"]).tree["tokens"]["x"] == 1
