"""Which sweep a verb takes."""

import os
from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.cli.main import run as run_verb
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import find_sweep, sweep_argument, sweep_names


@pytest.fixture
def two_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An older sweep `zebra` and the latest, `ape`."""
    monkeypatch.chdir(tmp_path)
    for second, name in enumerate(("zebra", "ape"), start=1):
        store = Store(Path("results") / name).create()
        store.save_run(run("base", "b0"))
        store.append_command(
            {"command": "python -m vitsweep", "time": f"2026-10-2{second}T10:00:00"}
        )
        os.utime(store.root / "commands.jsonl", (second, second))
    store.save_run(run("dead", "b0", status=Status.out_of_memory, precision="O2"))
    return tmp_path


def test_without_a_name_the_latest_is_taken_and_named(two_sweeps, capsys) -> None:
    assert sweep_names() == ["ape", "zebra"]
    assert find_sweep(None).name == "ape"
    assert capsys.readouterr().err == "Sweep `ape`, the latest.\n"
    os.utime("results/zebra/commands.jsonl", (9, 9))
    assert find_sweep(None).name == "zebra"
    assert find_sweep("ape").name == "ape"


@pytest.mark.parametrize("name", [None, "ape"])
def test_where_there_is_none_it_says_so(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitsweepError, match="`results/`"):
        find_sweep(name)


def test_a_folder_without_cells_is_no_sweep(two_sweeps) -> None:
    for folder in ("empty", "ape", "results/none"):
        Path(folder).mkdir()
    for name in ("empty", "none", str(two_sweeps / "empty")):
        with pytest.raises(VitsweepError, match=f"{name}`.*`cells/`"):
            find_sweep(name)
    assert find_sweep("ape").root == Path("results/ape")


def test_all_sweeps_are_listed(two_sweeps, capsys) -> None:
    assert run_verb(["status", "--all"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("ape") < shown.index("zebra")
    assert "1 out of memory" in shown
    assert "2026-10-22 10:00" in shown
    assert run_verb(["status", "ape", "--all"]) == 2


def test_a_sweep_is_named_as_a_command_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep_argument(Store(Path("results") / "ape")) == "ape"
    assert sweep_argument(Store(tmp_path / "results" / "ape")) == "ape"
    assert sweep_argument(Store(Path("analysis") / "sample")) == "analysis/sample"
    assert sweep_argument(Store(Path("other") / "results" / "ape")) == "other/results/ape"
