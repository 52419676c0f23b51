"""What chooses from the runs before is refused on a cluster, where jobs hold all their blocks."""

from pathlib import Path

import pytest

from hydra_plugins.vitsweep_launchers.plugin import LocalLauncher, SlurmLauncher
from tests.composition.test_sweep_settings import settings
from vitsweep.api.session import require_rounds
from vitsweep.cli.main import run
from vitsweep.errors import BadValueError


def test_what_chooses_from_the_runs_before_is_refused_with_the_way_out() -> None:
    for typed in ("search=race", "minutes=3", "limit.key=batch.images_per_step", "screening=true"):
        require_rounds(LocalLauncher(), "local", settings(f"sweep.{typed}"))
        with pytest.raises(
            BadValueError,
            match=rf"^`sweep.{typed}.* `hydra/launcher=slurm`.*local.*=allocation.*sbatch slurm/",
        ):
            require_rounds(SlurmLauncher(), "slurm", settings(f"sweep.{typed}"))
    require_rounds(SlurmLauncher(), "slurm", settings())


def test_a_command_without_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["-m", "sharding=ddp", "hydra/launcher=slurm"]) == 2
    assert "`sbatch`" in capsys.readouterr().err


def test_a_typed_threshold_of_slow_cells_is_refused_and_the_default_is_not() -> None:
    """Jobs hold all blocks of a cell, however slow it is."""
    for typed in ("sweep.prune_slowdown=3", "sweep.prune_slowdown=4"):
        require_rounds(LocalLauncher(), "local", settings(typed), [typed])
        with pytest.raises(BadValueError, match=rf"^`{typed}` .* `hydra/launcher=slurm`"):
            require_rounds(SlurmLauncher(), "slurm", settings(typed), [typed])
    off = "sweep.prune_slowdown=null"
    require_rounds(SlurmLauncher(), "slurm", settings(off), [off])


def test_a_plan_refuses_what_the_sweep_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    site = ["hydra.launcher.site.cores_per_node=4", "hydra.launcher.site.gpus_per_node=0"]
    for typed in ("sweep.minutes=3", "sweep.prune_slowdown=3"):
        said = []
        for verb in (["plan", "--no-predict"], []):
            assert run([*verb, "hydra/launcher=slurm", *site, typed]) == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1]
        assert said[0].startswith(f"`{typed}`")
