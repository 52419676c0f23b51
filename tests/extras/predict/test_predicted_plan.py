"""Predictions in a plan: columns, files, other hardware, cells that do not fit."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.cells import GPU_NODE, TINY
from tests.command import Command
from vitsweep.api.plan import machine_with
from vitsweep.extras.predict.admission import fastest_predicted, sums
from vitsweep.rates.profile import profile_named
from vitsweep.spec.resources import HERE, Machine


@pytest.mark.smoke
def test_a_plan_predicts_and_writes_all_columns(
    vitsweep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cells = (*TINY[:-1], "data=synthetic", "batch.scope=per_replica", "precision=fp32")
    batches = ("batch.images_per_step=16,65536", "sweep.baseline=null")
    shown = vitsweep(
        "plan",
        "-m",
        *cells,
        *batches,
        "--hardware",
        "h100",
        "resources.nodes=2",
        "--parquet",
        "p.parquet",
        quick=False,
    ).stdout
    assert "will not fit: " in shown
    assert "`sweep.try_anyway=true`" in shown
    table = pd.read_parquet(tmp_path / "p.parquet").set_index("batch.images_per_step")
    assert list(table["state"]) == ["runnable", "will not fit"]
    small = table.loc["16"]
    assert small["hardware"] == "h100"
    assert small["step_time_low_ms"] < small["step_time_ms"] < small["step_time_high_ms"]
    assert small["gradient_bytes_per_step"] == 2 * 15 / 16 * 4 * small["num_parameters"]
    assert small["optimizer_state_gib"] > 2 * small["parameter_gib"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "h1000"], "did you mean"),
        (["--frob"], "--frob"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str, vitsweep: Command) -> None:
    done = vitsweep("plan", *TINY, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_node_of_named_hardware_has_as_many_devices_as_its_profile_says() -> None:
    for name in ("h100", "rtx_4090"):
        assert (
            machine_with(profile_named(name)).devices_per_node
            == profile_named(name)["devices_per_node"]
        )


def test_faster_is_not_predicted_where_intervals_overlap() -> None:
    def row(cell: str, ms: float, low: float, high: float, **other: object) -> dict[str, object]:
        step = {"step_time_ms": ms, "step_time_low_ms": low, "step_time_high_ms": high}
        speed = {"images_per_second": 64_000 / ms, "ranks": 8}
        return {"cell": cell, "state": "runnable", "runs": 1, "reasons": []} | step | speed | other

    rows = [row("O1", 46, 21, 102), row("fp32", 138, 60, 300), row("O2", 45, 21, 100)]
    node = Machine(
        device="cuda", cores_per_node=96, devices_per_node=8, described_by="partition main"
    )
    [said] = sums(rows, node)
    assert re.search(r" 80 % .* O2, O1 and 1 other ", said)
    apart = [row("O1", 46, 41, 52), row("fp32", 138, 120, 160), row("big", 9, 8, 10, reasons=["-"])]
    assert [": O1." in text for text in sums(apart, node)] == [True]
    assert sums(apart[:1], node) == []
    hours = {
        "device_hours": 1.12,
        "device_hours_low": 1,
        "device_hours_high": 2,
        "hours": 1.12,
    }
    said = "0.14 node-hours = 1.1 GPU-hours of partition main (1.0 to 2.0), 1 h 07 min"
    assert said in sums([row("O1", 46, 41, 52, **hours)], node)[0]
    here = replace(node, device="cpu", devices_per_node=0, described_by=HERE)
    assert "1.1 rank-hours" in sums([row("O1", 46, 41, 52, **hours)], here)[0]
    lines = sums([row("O1", 46, 41, 52, **hours), row("fp32", 46, 41, 52, **hours, runs=0)], node)
    assert "missing runs: " in lines[0]
    assert " a and b " in fastest_predicted([("a", 2, 4), ("b", 1, 2), ("c", 0.5, 1)])


def test_sums_say_of_how_many_cells_they_are() -> None:
    """What is not predicted is neither free nor slow; more ranks are no faster technique."""

    def row(cell: str, ms: float, ranks: int = 8, **other: object) -> dict[str, object]:
        step = {"step_time_ms": ms, "step_time_low_ms": 0.9 * ms, "step_time_high_ms": 1.1 * ms}
        hours = dict.fromkeys(
            ("hours", "device_hours", "device_hours_low", "device_hours_high"), 1.0
        )
        speed = {"images_per_second": 64_000 * ranks / ms, "ranks": ranks, "notes": "A.\nB."}
        return (
            {"cell": cell, "state": "runnable", "runs": 1, "reasons": []}
            | step
            | hours
            | speed
            | other
        )

    untraced = [
        {
            "cell": f"u{n}",
            "state": "runnable",
            "runs": 5,
            "reasons": [],
            "why_not_predicted": "late",
        }
        for n in range(4)
    ]
    measured = {"cell": "m", "state": "measured", "runs": 0, "reasons": []}
    known = [row("slow", 50), row("quick", 20, notes="B.\nC.")]
    said = sums([*known, *untraced], GPU_NODE)
    assert said[0].startswith("Predicted for the missing runs of 2 of 6 cells: ")
    assert "Predicted to be fastest of the 2 predicted cells: quick." in said
    assert said[-3:] == ["A.", "B.", "C."], "each sentence once"
    endless = row("long", 30, hours=None, device_hours=None)
    assert " of 2 of 3 cells: " in sums([*known, endless], GPU_NODE)[0]
    for rows in (known, [*known, measured | {"images_per_second": 1.0} | row("m", 90, runs=0)]):
        said = sums(rows, GPU_NODE)
        assert said[0].startswith("Predicted for the missing runs: ")
        assert "Predicted to be fastest: quick." in said
    many = [*known, row("slow", 51, 32), row("quick", 21, 32), row("alone", 5, 64)]
    said = [text for text in sums(many, GPU_NODE) if "fastest" in text]
    assert said == [f"Predicted to be fastest of the 2 cells on {n} ranks: quick." for n in (8, 32)]
