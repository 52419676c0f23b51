"""Which command lines a retry becomes: the cells that ended so, whichever command asked for them."""

from pathlib import Path
from typing import Any

import pytest

from tests.builders import run
from tests.cells import TINY
from tests.cells import composer as shared
from vitsweep.cli import retry
from vitsweep.cli.retry import retries
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import VitsweepError
from vitsweep.planning.freeze import freeze
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine

MACHINE = Machine(device="cpu", cores_per_node=2, devices_per_node=0)
CODE: dict[str, Any] = {"git_commit": None, "git_dirty": False, "packages": {"torch": "2"}}


def retried(sweep: Path | str, *words: str) -> list[list[str]]:
    return retries([str(sweep), *words])


def commanded(store: Store, composer: Composer, line: str, status: Status, *cells: str) -> set[str]:
    """Freeze the cells of a command, note it as typed, and let all of them end so."""
    asked = expand([*TINY, *cells, "sweep.baseline=null"], composer)
    plan = plan_of(asked, MACHINE, composer)
    freeze(store, plan, sweep_settings(asked[0].tree), CODE)
    lines = store.commands()
    lines[-1]["command"] = line
    lines[-1]["hydra"] = [word for word in line.split() if word.startswith("hydra")]
    (store.root / "commands.jsonl").unlink()
    for entry in lines:
        store.append_command(entry)
    for cell_id in plan.entries:
        store.save_run(run(cell_id, "b0", 100, status=status))
    return set(plan.entries)


def ids_of(lines: list[list[str]], composer: Composer) -> list[set[str]]:
    """The cells that the command lines ask for."""
    found = []
    for _, *overrides in lines:
        own = [text for text in overrides if not text.startswith(("hydra", "-"))]
        found.append(set(plan_of(expand(own, composer), MACHINE, composer).entries))
    return found


@pytest.fixture
def composer() -> Composer:
    return shared()


def test_cells_of_all_commands_run_again_each_with_its_launcher(
    tmp_path: Path, composer: Composer
) -> None:
    store = Store(tmp_path / "mine").create()
    first = (
        "python -m vitsweep -m sharding=zero1,fsdp hydra/launcher=slurm hydra.launcher.partition=a"
    )
    lost = commanded(store, composer, first, Status.killed, "sharding=zero1,fsdp")
    full = commanded(store, composer, "vitsweep seed=3", Status.out_of_memory, "seed=3")
    commanded(store, composer, "vitsweep sharding=zero2", Status.measured, "sharding=zero2")
    commanded(store, composer, "vitsweep retry mine", Status.measured, "seed=9")

    of_slurm, of_local = retried(store.root)
    assert of_slurm[:3] == ["-m", "hydra/launcher=slurm", "hydra.launcher.partition=a"]
    assert not any(text.startswith("hydra") for text in of_local)
    assert ids_of([of_slurm, of_local], composer) == [lost, full]
    assert {"sweep.name=mine", "machine=cpu"} <= {*of_slurm}
    assert ids_of(retried(store.root, "--status", "out_of_memory"), composer) == [full]
    assert retried(store.root, "--status", "diverged") == []


def test_what_is_set_makes_new_cells_of_those_that_ended_so(
    tmp_path: Path, composer: Composer
) -> None:
    store = Store(tmp_path / "mine").create()
    full = commanded(store, composer, "vitsweep -m seed=3,4", Status.out_of_memory, "seed=3,4")
    more = ("--status", "out_of_memory", "--set", "resources.nodes=4")
    [found] = ids_of(retried(store.root, *more), composer)
    wanted = expand([*TINY, "seed=3,4", "resources.nodes=4", "sweep.baseline=null"], composer)
    assert found == set(plan_of(wanted, MACHINE, composer).entries)
    assert not found & full


def test_where_nothing_runs_again_the_command_that_goes_on_is_named_and_overrides_are_checked(
    tmp_path: Path, composer: Composer, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "mine").create()
    [cell_id] = commanded(store, composer, "vitsweep seed=3 x", Status.measured, "seed=3")
    store.save_run(run(cell_id, "b1", **{"measurement.blocks": 3}))
    entry = store.commands()[-1] | {"prune_slowdown": 4}
    store.append_command(entry)
    assert retried(store.root) == []
    said = capsys.readouterr().out
    assert "Missing: 1 run " in said
    assert said.endswith("vitsweep seed=3 x\n")
    for wrong in ("memry=x", "memory=x"):
        with pytest.raises(VitsweepError, match=f"^`{wrong}`"):
            retried(store.root, "--set", wrong)
    assert retried(store.root, "--set", "memory=recompute_blocks") == []
    assert "nothing to run again" in capsys.readouterr().out


def test_an_unknown_sweep_or_status_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="no sweep `nowhere`"):
        retried("nowhere")
    Store(tmp_path / "mine").create()
    with pytest.raises(VitsweepError, match="--status measured"):
        retried(tmp_path / "mine", "--status", "measured")


def test_a_command_keeps_the_folder_and_name_of_its_configuration(
    tmp_path: Path, composer: Composer
) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    found = Composer(hydra.open_loader(conf_dir(), folder), "mine", ["hydra.launcher.mem_gb=2"])
    assert found.words == [
        "--config-dir", str(folder), "--config-name", "mine", "hydra.launcher.mem_gb=2",
    ]  # fmt: skip
    assert composer.words == []


def test_the_exit_code_is_the_worst_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(command: list[str]) -> int:
        [code] = command
        if code.isdigit():
            return int(code)
        raise SystemExit(int(code[1:]) if code[1:] else None)

    monkeypatch.setattr(retry, "measure_cells", ends)
    for codes, worst in (
        ("", 0), ("0", 0), ("3", 3), ("3 0", 3), ("0 3", 3), ("x3 0", 3), ("0 x3", 3), ("x", 0), ("3 x", 3),
        ("x x3", 3),
    ):  # fmt: skip
        monkeypatch.setattr(retry, "retries", lambda _, codes=codes: [[c] for c in codes.split()])
        assert retry.run([]) == worst, codes


def test_settings_of_the_sweep_stay_but_those_that_a_retry_replaces(
    tmp_path: Path, composer: Composer
) -> None:
    store = Store(tmp_path / "mine").create()
    line = "vitsweep hydra/launcher=slurm hydra.mode=MULTIRUN hydra/sweeper=x hydra.sweeper.y=1"
    cells = ("seed=3", "sweep.remeasure=true", "sweep.indifference=0.1")
    commanded(store, composer, line, Status.failed, *cells)
    [[flag, *found]] = retried(store.root)
    assert flag == "-m"
    assert found[:1] == ["hydra/launcher=slurm"]
    assert [text for text in found if text.startswith("hydra")] == found[:1]
    assert "sweep.indifference=0.1" in found
    assert not any(text.startswith("sweep.remeasure") for text in found)
    assert f"sweep.folder={tmp_path}" in found or f"sweep.folder='{tmp_path}'" in found
    assert sum(text.startswith("sweep.name=") for text in found) == 1
    store.append_command({"comparison": {}, "command": "vitsweep compare x"})
    with pytest.raises(VitsweepError, match="`compare`"):
        retried(store.root)
    for status in ("", ",", "failed,measured", "nosuch"):
        with pytest.raises(VitsweepError, match=f"^`--status {status}`"):
            retries([str(store.root), "--status", status])


def test_the_old_name_of_what_a_race_ranks_by_is_read(tmp_path: Path, composer: Composer) -> None:
    store = Store(tmp_path / "mine").create()
    race = ("seed=3", "sweep.search=race", "sweep.rank_by=throughput_per_cost")
    [cell_id] = commanded(store, composer, "vitsweep seed=3", Status.failed, *race[:1])
    document, _ = store.frozen_by(cell_id)
    words = [*document["overrides"], race[1], "sweep.objective=throughput_per_cost"]
    (store.cell(cell_id) / "cell.yaml").unlink()
    store.freeze(cell_id, {**document, "overrides": words})
    [found] = retried(store.root)
    assert race[2] in found
