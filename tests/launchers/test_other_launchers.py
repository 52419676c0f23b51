"""Launchers that are not vitsweep's: one that a user adds, and those that come with Hydra."""

import re
from pathlib import Path

import pytest

from tests.command import Command

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "launcher.md"
LAUNCHER, YAML = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.slow
def test_a_launcher_from_outside_runs_a_sweep(
    vitsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = vitsweep.folder / "plugins" / "hydra_plugins"
    conf = vitsweep.folder / "my_conf" / "hydra" / "launcher"
    for folder in (plugins, conf):
        folder.mkdir(parents=True)
    (plugins / "resting_launcher.py").write_text(LAUNCHER)
    (conf / "resting.yaml").write_text(YAML)
    monkeypatch.setenv("PYTHONPATH", str(plugins.parent))

    process = vitsweep.start(
        "-m", "--config-dir", str(conf.parents[1]), "hydra/launcher=resting", "sharding=ddp,fsdp"
    )
    _, errors = process.communicate(timeout=300)

    assert process.returncode == 0, errors
    cells = vitsweep.cells()
    assert dict(zip(cells["sharding"], cells["status"], strict=True)) == {
        "ddp": "measured",
        "fsdp": "measured",
    }
    assert set(vitsweep.runs()["launcher"]) == {"resting"}


@pytest.mark.full
def test_a_sweep_of_hydras_own_launcher_ends_with_the_table(vitsweep: Command) -> None:
    ended = vitsweep(
        "-m", "hydra/launcher=basic", "optimizer=adamw_foreach,adamw_fused", "sweep.report=true"
    )
    assert ended.returncode == 0, ended.stderr
    assert "Report: results/default/report/index.html" in ended.stdout
    assert set(vitsweep.cells()["optimizer"]) == {"adamw_loop", "adamw_foreach", "adamw_fused"}
