"""A wrong setting of a sweep or of its launcher is one sentence, before anything is written."""

from pathlib import Path

import pytest

from tests.cells import composer
from tests.command import Command
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


@pytest.mark.parametrize(
    "override",
    [
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
    ],
)
def test_what_is_allowed_is_taken(override: str) -> None:
    settings(override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sweep.remeasure=maybe", "`sweep.remeasure=maybe`: must be a valid boolean"),
        ("sweep.snapshot_code=1", "`sweep.snapshot_code=1`: must be a valid boolean"),
        ("sweep.cells_per_block=0", "`sweep.cells_per_block=0`: must be greater than 0"),
        ("sweep.cells_per_block=2.5", "`sweep.cells_per_block=2.5`: must be a valid integer"),
        ("sweep.question=5", "`sweep.question=5`: must be a valid string"),
        ("sweep.name=null", "`sweep.name=null`: must be a valid string"),
        ("sweep.folder=null", "`sweep.folder=null`: must be a valid string"),
        ("sweep.folder=''", "`sweep.folder=` is no path of a folder"),
        ("sweep.replicate=precision", "`sweep.replicate=precision`: must be"),
        ("sweep.zip=5", "`sweep.zip=5`: must be a list, like `[a,b]`"),
        ("sweep.match=model", "`sweep.match=model`: must be a list, like `[a,b]`"),
        ("sweep.limit=5", "`sweep.limit` is a section; set one of its keys: `sweep.limit.key`"),
        ("sweep.limit.first=x", "`sweep.limit.first=x`: must be a valid integer"),
        (
            "+sweep.nmae=x",
            "`sweep.nmae` does not exist; did you mean `sweep.name`?",
        ),
        ("sweep.search=fastest", "`sweep.search=fastest`: must be"),
        ("sweep.indifference=1", "`sweep.indifference=1`: must be less than 1"),
        ("sweep.indifference=0", "`sweep.indifference=0`: must be greater than 0"),
        ("sweep.minutes=0", "`sweep.minutes=0`: must be greater than 0"),
        ("sweep.objective=throughptu", "did you mean `sweep.objective=throughput`?"),
        ("sweep.objective=time_to_accuracy", "must be 'throughput' or"),
        ("sweep.retry=failed", "`sweep.retry=failed`: must be a list, like `[a,b]`"),
        ("sweep.retry=[measured]", "`sweep.retry=[measured]`: cells can run again whose status is"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(override: str, told: str) -> None:
    with pytest.raises(BadValueError) as error:
        settings(override)
    assert told in str(error.value)


def test_a_grid_with_minutes_needs_a_baseline() -> None:
    assert settings("sweep.minutes=5").minutes == 5
    with pytest.raises(
        BadValueError, match=r"`sweep.minutes=5` ends where it is known how each cell"
    ):
        settings("sweep.minutes=5", "sweep.baseline=null")


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
        with pytest.raises(BadValueError, match=r"^`sweep\.name=.* must name a folder") as error:
            sweep_settings({"sweep": tree["sweep"] | {"name": name}})
        assert "\n" not in str(error.value)
    assert sweep_settings({"sweep": tree["sweep"] | {"name": "über 1"}}).name == "über 1"


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(BadValueError) as error:
        settings("sweep.remeasure=maybe", "sweep.cells_per_block=0")
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("hydra.launcher.parallel=2", "type two commands with a `sweep.name` each"),
        ("hydra.launcher.mem_gb=2", "the launcher of this machine has no settings"),
        ("sweep.remeasure=maybe", "`sweep.remeasure=maybe`: must be a valid boolean"),
        ("sweep.retry=[faild]", "cells can run again whose status is"),
        ("sweep.name=../../x", "`sweep.name=../../x` must name a folder"),
        ("sweep.name=null", "`sweep.name=null`: must be a valid string"),
        ("sweep.cells_per_block=0", "`sweep.cells_per_block=0`: must be greater than 0"),
    ],
)
@pytest.mark.parametrize("verb", [["plan", "-m"], ["-m"]], ids=["plan", "run"])
def test_the_command_line_ends_with_the_sentence_and_writes_nothing(
    override: str, told: str, verb: list[str], tmp_path: Path
) -> None:
    done = Command(tmp_path)(*verb, "precision=O1,fp32", override)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
