"""What vitsweep uses of Hydra's inside, each part once: what breaks here broke in Hydra."""

from pathlib import Path
from typing import Any

import pytest

from tests.composition import small_conf
from vitsweep.composition import hydra


@pytest.fixture
def loader(tmp_path: Path) -> Any:
    return hydra.open_loader(small_conf.write(tmp_path))


def test_parse_and_write_back(loader: Any) -> None:
    override = hydra.parse("++model.note='a, b'", loader)
    assert hydra.own_text(override) == "'a, b'"
    assert list(hydra.axis_texts(override)) == ["++model.note='a, b'"]
    assert hydra.value_text([1, None, "x"]) == "[1,null,x]"


def test_enumerate_sweeps(loader: Any) -> None:
    def values(text: str) -> list[str]:
        return list(hydra.axis_texts(hydra.parse(text, loader)))

    assert values("seed=1,2") == ["seed=1", "seed=2"]
    assert values("seed=range(0,4,2)") == ["seed=0", "seed=2"]
    assert values("precision=glob(*)") == ["precision=half", "precision=plain"]


def test_files_behind_a_loader(loader: Any) -> None:
    files = hydra.repository(loader, "config", [])
    assert files.group_exists("nested/kind")
    assert not files.group_exists("seed")
    assert hydra.load_file(files, "model/missing") is None
    assert hydra.load_file(files, "model/small") == hydra.ConfigFile(
        {"width": 8, "depth": 2, "inner": {"a": 1, "b": [1, 2]}}, None, has_defaults=False
    )
    based, head = (hydra.load_file(files, f) for f in ("model/based", "head/two"))
    assert based is not None
    assert based.has_defaults
    assert head is not None
    assert head.package == "model"


def test_compose_and_read(loader: Any) -> None:
    config = hydra.compose(loader, "config", ["model=follows", "seed=4"])
    assert hydra.plain(config)["model"]["width"] == "${seed}"
    assert hydra.plain_resolved(config)["model"]["width"] == 4
    assert hydra.plain_resolved(config)["seed"] == 4
    assert hydra.chosen(config) == {
        "model": "follows",
        "precision": "plain",
        "data": "images",
        "head": "one",
        "nested/kind": "a",
    }


def test_sources_in_order_of_merging(loader: Any) -> None:
    found = hydra.sources(loader, "config", ["+experiment=wide", "head=two"])
    own = [(path, package) for path, package in found if not path.startswith("hydra")]
    assert own == [
        ("model/small", "model"),
        ("precision/half", "precision"),
        ("data/images", "data"),
        ("head/two", "model"),
        ("nested/kind/a", "nested.kind"),
        ("config", ""),
        ("experiment/wide", ""),
    ]
