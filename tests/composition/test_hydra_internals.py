"""What vitsweep uses of Hydra's inside, each part once: what breaks here broke in Hydra."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.composition import small_conf
from vitsweep.composition import hydra
from vitsweep.errors import BadValueError


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


def test_settings_that_nothing_reads_are_refused() -> None:
    stock = "hydra/launcher=basic"
    for typed in (
        ["hydra/launcher=slurm", "hydra.launcher.mem_gb=2"],
        ["+hydra/launcher=slurm", "hydra.launcher.mem_gb=2"],
        ["hydra.searchpath=[x]"],
        [hydra.OWN_SWEEPER],
        [stock, "hydra.job.env_set.A=1"],
        ["hydra/launcher=submitit_slurm", "hydra.job.env_copy=[A]"],
        ["+sweep=first"],
        ["sweep.name=x", "precision=O1", "hydraulic=1"],
    ):
        hydra.refuse_ignored(typed, has_own_conf=True)
    hydra.refuse_ignored(["+sweep=of_a_plugin"], has_own_conf=False)
    for typed in (
        ["hydra.job.env_set.A=1"],
        ["hydra/launcher=slurm", "hydra.job.env_set.A=1"],
        ["hydra/launcher=slurm", "hydra.job.env_copy=[A]"],
        [stock, "hydra.job.env_setting=1"],
        [stock, "hydra.job.name=x"],
        ["hydra.verbose=true"],
        ["~hydra.verbose"],
        ["+hydra/callbacks=x"],
        ["hydra.searchpaths=[x]"],
        ["hydra.launcher=slurm"],
        ["hydra/sweeper=basic"],
        ["hydra.sweeper.max_batch_size=2"],
        ["hydra.launcher.mem_gb=2"],
        ["~hydra.launcher.mem_gb"],
        ["sweep=first"],
        ["++sweep=first"],
        ["+sweep=a-b"],
        ["+sweep=of_a_plugin"],
    ):
        with pytest.raises(BadValueError, match=f"^`{re.escape(typed[-1])}`"):
            hydra.refuse_ignored(typed, has_own_conf=True)


def test_what_the_grammar_does_not_read_is_reported_by_its_kind() -> None:
    for typed, told in (
        ("seed", ["key=value", "precision=O1"]),
        ("a=[1", [".-_/", "a=['a=b']"]),
        ("a={b", [".-_/", "a=['a=b']"]),
        ("a=1,,2", []),
        ("a=1,", []),
        ("a=b=c", [".-_/", "\"a='b=c'\""]),
        ("a=b c:", [".-_/", "\"a='b c:'\""]),
    ):
        codes = hydra._unreadable(typed).split("`")[1::2]
        assert codes == [typed, *told], typed
    with pytest.raises(BadValueError, match=r"^`a=\[1`"):
        hydra.parse_overrides(["a=[1"])
    assert [hydra.key_of(text) for text in ("++a.b=1=2", "~c", "+d=")] == ["a.b", "c", "d"]


def test_values_of_python_become_values_of_the_grammar() -> None:
    for value, plain in (
        (None, None), (True, True), (2, 2), (0.5, 0.5), ("a", "a"), (Path("/x"), "/x"), ((1, "a"), [1, "a"]),
        ({"a": (1,)}, {"a": [1]}), (range(2), [0, 1]), (np.int64(3), 3), (np.array([1.5]), [1.5]),
    ):  # fmt: skip
        found = hydra.plain_value("key", value)
        assert found == plain
        assert type(found) is type(plain)
    for wrong in (b"x", bytearray(b"x"), object(), [b"x"], {"a": object()}):
        with pytest.raises(BadValueError, match=r"^`key="):
            hydra.plain_value("key", wrong)
    for value, text in (
        ("a", "k=a"), ("a.b/c-d_1", "k=a.b/c-d_1"), ("1", "k='1'"), ("", "k=''"), ("Null", "k='Null'"),
        ("NaN", "k='NaN'"), ("nano", "k=nano"), ("a b", "k='a b'"), ([1, "x y"], "k=[1,'x y']"),
        ({"a": "true"}, "k={a:'true'}"), (None, "k=null"), (True, "k=True"),
    ):  # fmt: skip
        assert hydra.value_override("k", value) == text
    assert hydra.sweep_override("k", [1, "a b", None]) == "k=1,'a b',null"
