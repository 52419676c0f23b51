"""From the command line to the chart, and the same command again."""

import json
import re

import pandas as pd
import pytest

from tests.command import Command

SWEEP = (
    "-m",
    "sharding=ddp,fsdp",
    "measurement.blocks=3",
    "measurement.prove=twin",
)


# Twenty seconds where other tests run: the whole way, three commands and their eight runs.
@pytest.mark.slow
def test_a_sweep_ends_in_a_table_charts_and_a_report_and_a_wider_one_runs_only_what_is_new(
    vitsweep: Command,
) -> None:
    done = vitsweep(*SWEEP, "sweep.report=true")

    assert done.returncode == 0, done.stderr
    for said in ("2 cells in results/", "[1/", "Drawing the charts"):
        assert (said in done.stderr, said in done.stdout) == (True, False), said
    assert "img/s" in done.stdout
    assert "Report: results/default/report/index.html" in done.stdout
    cells = vitsweep.cells().set_index("sharding")
    assert (cells["status"] == "measured").all()
    assert (cells["blocks"] == 3).all()
    assert cells.loc["ddp", "speedup"] == 1
    fsdp = cells.loc["fsdp"]
    assert fsdp["speedup_low"] < fsdp["speedup"] < fsdp["speedup_high"]
    assert cells["proved"].str.startswith("twin").all()
    root = vitsweep.store.root
    page = (root / "report" / "index.html").read_text()
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["']https?://""", page)  # it opens without a network
    assert list((root / "report").glob("*.png"))
    assert {p.name for p in vitsweep.folder.iterdir()} == {"results"}
    assert_frozen_and_recorded(vitsweep)
    first = vitsweep.runs()

    again = vitsweep(*SWEEP)
    assert "measured already" in again.stderr
    assert len(vitsweep.runs()) == len(first) == 6

    wider = vitsweep("-q", "-m", "sharding=ddp,fsdp,zero1", "measurement.prove=twin")
    assert wider.returncode == 0, wider.stderr
    assert not wider.stderr
    assert "img/s" in wider.stdout
    assert "in results/" not in wider.stdout
    runs = vitsweep.runs()
    new = runs[~runs["run_id"].isin(first["run_id"])]
    # the new cell brings its baseline along: their ratio is taken within one block
    assert sorted(new["sharding"]) == ["ddp", "zero1"]
    assert new["block"].nunique() == 1


def assert_frozen_and_recorded(vitsweep: Command) -> None:
    """What a first command froze and recorded is complete."""
    store = vitsweep.store
    runs = list(store.runs())
    assert {run.cell_id for run in runs} == {
        c["cell_id"] for c in map(store.frozen, store.cell_ids())
    }
    for run in runs:
        assert run.samples["step_time_ms"]
        assert run.environment["torch"]
        assert run.metrics["gradient_bytes_per_step"] > 0
    command = json.loads((store.root / "commands.jsonl").read_text())
    assert re.match(r"python (-P )?-m vitsweep ", command["command"])  # a server of tests has -P
    assert command["command"].endswith(f" {SWEEP[-1]} sweep.report=true")
    samples = pd.read_parquet(store.root / "samples.parquet")
    assert set(samples.columns) >= {"block", "rank", "step", "step_time_ms", "warm_up", "skipped"}


@pytest.mark.full
def test_every_block_holds_every_cell_and_the_baseline_in_changing_order(vitsweep: Command) -> None:
    vitsweep("-m", "optimizer=adamw_foreach,adamw_fused", "measurement.blocks=6")
    runs = vitsweep.runs()

    orders = {
        tuple(block.sort_values("position")["optimizer"]) for _, block in runs.groupby("block")
    }
    assert all(sorted(o) == ["adamw_foreach", "adamw_fused", "adamw_loop"] for o in orders)
    assert len(orders) > 1  # six equal draws of six orders: one in 7,776
    assert runs["block"].nunique() == 6


def test_plan_trains_nothing_and_says_what_would_run(vitsweep: Command) -> None:
    planned = vitsweep("plan", "-m", "sharding=ddp,fsdp,hsdp")

    assert planned.returncode == 0, planned.stderr
    assert "runnable 2" in planned.stdout
    assert "invalid 1" in planned.stdout
    assert "at least 2 replicas" in planned.stdout
    assert not (vitsweep.folder / "results").exists()
