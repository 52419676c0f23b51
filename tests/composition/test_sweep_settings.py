"""A wrong setting of a sweep or of its launcher is one sentence, before anything is written."""

from pathlib import Path

import pytest

from tests.cells import composer
from tests.refusals import require
from vitsweep.cli.main import run
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError


def settings(*overrides: str) -> SweepSettings:
    return sweep_settings(expand(list(overrides), composer())[0].tree)


def test_the_shipped_settings_are_typed() -> None:
    found = settings()
    assert found.path == Path("results/vit_nano")
    assert found.match == ("model", "data", "task", "resources", "batch")
    assert (found.cells_per_block, found.limit.key, found.limit.within) == (8, None, 0.06)


def test_what_is_allowed_is_taken() -> None:
    for override in [
        "sweep.name='two words, ümlaut'",
        "sweep.name=v1.2_a-b",
        "sweep.folder=/tmp/elsewhere",
        "sweep.baseline=null",
        "sweep.baseline={precision:O1}",
        "sweep.baseline=['precision=O1']",
        "sweep.retry=[failed,out_of_memory]",
        "sweep.replicate=seed",
        "sweep.limit={first:5,within:0.4}",
        "+sweep=dsp_weak_scaling",
        "+sweep=one_at_a_time",
    ]:
        settings(override)


def test_a_wrong_value_is_named_with_its_rule() -> None:
    for override, names in [
        ("sweep.remeasure=maybe", "`sweep.remeasure=maybe`"),
        ("sweep.snapshot_code=1", "`sweep.snapshot_code=1`"),
        ("sweep.cells_per_block=0", "`sweep.cells_per_block=0` 0"),
        ("sweep.cells_per_block=2.5", "`sweep.cells_per_block=2.5`"),
        ("sweep.question=null", "`sweep.question=null`"),
        ("sweep.name=null", "`sweep.name=null`"),
        ("sweep.folder=null", "`sweep.folder=null`"),
        ("sweep.folder=''", "`sweep.folder=`"),
        ("sweep.replicate=precision", "`sweep.replicate=precision`"),
        ("sweep.zip=5", "`sweep.zip=5` `[a,b]`"),
        ("sweep.match=model", "`sweep.match=model` `[model]`"),
        ("sweep.limit=5", "`sweep.limit` `sweep.limit.key`"),
        ("sweep.limit.first=x", "`sweep.limit.first=x`"),
        (
            "+sweep.nmae=x",
            "`sweep.nmae` `sweep.name`",
        ),
        ("sweep.search=fastest", "`sweep.search=fastest`"),
        ("sweep.indifference=1", "`sweep.indifference=1` 1"),
        ("sweep.indifference=0", "`sweep.indifference=0` 0"),
        ("sweep.minutes=0", "`sweep.minutes=0` 0"),
        ("sweep.rank_by=throughptu", "`sweep.rank_by=throughput`"),
        ("sweep.rank_by=time_to_accuracy", "`sweep.rank_by=time_to_accuracy`"),
        ("sweep.retry=failed", "`sweep.retry=failed` `[failed]`"),
        ("sweep.retry=[measured]", "`sweep.retry=[measured]`"),
    ]:
        with pytest.raises(BadValueError) as error:
            settings(override)
        require(str(error.value), names)


def test_a_grid_with_minutes_needs_a_baseline() -> None:
    assert settings("sweep.minutes=5").minutes == 5
    with pytest.raises(BadValueError) as error:
        settings("sweep.minutes=5", "sweep.baseline=null")
    require(str(error.value), "`sweep.minutes=5` `sweep.baseline=null` `measurement.blocks=3`")


def test_a_name_that_is_no_folder_of_its_own_is_refused() -> None:
    tree = composer().compose().tree
    names = (
        "",
        "  ",
        ".",
        "..",
        "../../x",
        "/tmp/x",
        "a\\b",
        "a\nb",
        "a\x1bb",
        "a[1]",
        "a%j",
        "-x",
        "~",
    )
    for name in (*names, " x", "x" * 201):
        with pytest.raises(BadValueError, match=r"^`sweep\.name=") as error:
            sweep_settings({"sweep": tree["sweep"] | {"name": name}})
        assert "\n" not in str(error.value)
    assert sweep_settings({"sweep": tree["sweep"] | {"name": "über 1"}}).name == "über 1"


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(BadValueError) as error:
        settings("sweep.remeasure=maybe", "sweep.cells_per_block=0")
    assert len(str(error.value).splitlines()) == 2


def test_a_command_line_is_refused_in_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (["plan", "-m"], ["-m"]):
        for override, names in [
            ("hydra.launcher.parallel=2", "`hydra.launcher.parallel=2` `sweep.name`"),
            ("hydra.launcher.mem_gb=2", "`hydra.launcher.mem_gb=2`"),
            ("sweep.remeasure=maybe", "`sweep.remeasure=maybe`"),
            ("sweep.retry=[faild]", "`sweep.retry=[faild]`"),
            ("sweep.name=../../x", "`sweep.name=../../x`"),
            ("sweep.cells_per_block=0", "`sweep.cells_per_block=0` 0"),
        ]:
            assert run([*verb, "precision=O1,fp32", override]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            require(said.err.strip(), names)
            assert len(said.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
