"""Rounds on several nodes of a job of Slurm, by the script that its launcher names."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.cells import TINY
from tests.command import NO_REPORT, QUICK, ROOT, SWEEP, Command
from tests.extras.allocation.test_allocation import on, sshd
from tests.launchers.slurm.conftest import SlurmClient, cluster, slurm_packages
from vitsweep import extras
from vitsweep.tables.stats import MIN_BLOCKS

__all__ = ["cluster", "slurm_packages", "sshd"]


@pytest.mark.full
def test_the_script_of_one_job_bounds_a_sweep_on_two_nodes(
    cluster: SlurmClient, vitsweep: Command
) -> None:
    script, log = ROOT / "slurm" / "sweep_in_one_job.sbatch", vitsweep.folder / "job.out"
    options = ("--nodes=2", "--gpus-per-node=0", "--time=20", f"--output={log}")
    words = (
        *QUICK, NO_REPORT, f"sweep.name={SWEEP}", "resources.nodes=2,1", "resources.ranks_per_node=1",
        "sweep.match=[model]", "sweep.minutes=0.3", "measurement.blocks=3",
    )  # fmt: skip
    done = subprocess.run(
        ["sbatch", "--wait", *options, script, *words],
        env=cluster.env | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        cwd=vitsweep.folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    runs = vitsweep.runs()
    assert set(runs["launcher"]) == {"allocation"}
    assert {"127.0.0.1,127.0.0.2", "127.0.0.1"} <= set(runs["nodes_used"])
    [line] = vitsweep.store.commands()
    assert line["allocation"]["job"].startswith("scancel ")


@pytest.mark.full
@pytest.mark.timeout(3000)  # at each place a command takes its budget and a first block
def test_budgets_races_and_comparisons_have_equal_rules_here_by_ssh_and_inside_salloc(
    cluster: SlurmClient, sshd: tuple[str, ...], tmp_path: Path
) -> None:
    two = ("resources.nodes=2", "resources.ranks_per_node=1", "resources.threads_per_rank=1")
    srun = ("hydra/launcher=allocation", "hydra.launcher.start=srun")
    rules = {}
    for place, words, prefix in (
        ("here", ("resources.ranks_per_node=2", two[-1]), ()),
        ("ssh", (*on(2, "ssh", *sshd), *two), ()),
        ("salloc", (*srun, *two), ("salloc", "--nodes=2", "--time=30")),
    ):
        vitsweep = Command(tmp_path / place)
        vitsweep.folder.mkdir()
        of_sweep = ("-m", NO_REPORT, *QUICK, *words)
        budget = ("sharding=ddp,fsdp", "sweep.minutes=0.5")
        asked = {"budget": (*of_sweep, *budget, "sweep.name=budget")}
        if "race" in extras.FEATURES:
            race = ("sharding=ddp,zero1,fsdp", "sweep.search=race", "sweep.minutes=0.7")
            asked["race"] = (*of_sweep, *race, "sweep.name=race")
        if "compare" in extras.FEATURES:
            pair = ("sharding=ddp", "sharding=fsdp", "measurement.min_seconds=0.1", "--minutes=0.7")
            asked["compare"] = ("compare", *pair, NO_REPORT, *TINY, *words)
        for sweep, typed in asked.items():
            done = subprocess.run(
                [*prefix, sys.executable, "-m", "vitsweep", *typed],
                env=cluster.env | vitsweep._environment(),
                cwd=vitsweep.folder,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, (place, sweep, done.stdout + done.stderr)
            rules[place, sweep] = rules_of(vitsweep, sweep, 1 if place == "here" else 2)
    for (_, sweep), found in rules.items():
        assert found == rules["here", sweep]


def rules_of(vitsweep: Command, sweep: str, num_nodes: int) -> dict[str, Any]:
    """What holds of a sweep whatever its nodes, as far as the time that a run takes does not decide it."""
    cells, folder = vitsweep.cells(sweep), vitsweep.store.root.with_name(sweep)
    runs = pd.read_parquet(folder / "runs.parquet")
    assert set(runs["nodes_used"].str.count(",")) == {num_nodes - 1}
    baseline = cells["baseline_cell_id"].eq(cells["cell_id"])
    has_interval, blocks = cells["speedup_low"].notna(), runs[runs["purpose"].isna()]
    assert has_interval.eq((cells["blocks"] >= MIN_BLOCKS) & ~baseline).all()
    assert not blocks.duplicated(["block", "cell_id"]).any()
    return {
        "columns": {*cells.columns},
        "status": {*cells["status"]},
        "any_look": {*runs["any_look"]},
        "proved": {*cells["proved"]},
        "baselines": int(baseline.sum()),
    }
