"""`vitsweep gate` as it is typed."""

import re
from pathlib import Path

import pytest

from tests.builders import run
from tests.said import opening
from vitsweep.cli.main import run as front_door
from vitsweep.extras.gate.diff import GONE, TOO_FEW, WORSE
from vitsweep.report.views import collect
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.stats import Claim

SPEEDS = {"plain": (100, 101, 99, 100), "fast": (150, 151, 149, 150)}


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `results/kept`, to which sweeps are compared."""
    monkeypatch.chdir(tmp_path)
    measured("kept", SPEEDS)
    return tmp_path


def measured(
    name: str, speeds: dict[str, tuple[float, ...]], device: str = "AMD EPYC 7B13"
) -> Store:
    store = Store(Path("results") / name).create()
    for cell, values in speeds.items():
        for n, speed in enumerate(values):
            here = {"device": device}
            store.save_run(run(cell, f"b{n}", speed, precision=cell, environment=here, sweep=name))
    store.append_command({"baselines": dict.fromkeys(speeds, "plain")})
    return store


def verdict(said: str, verdicts: str) -> str:
    return opening("gate_verdict", said=said, comparisons="2 comparisons", verdicts=verdicts)


def gate(*arguments: str) -> int:
    return front_door(["gate", *arguments])


def test_a_passed_gate_ends_with_0_and_a_sentence_per_cell(sweeps, capsys) -> None:
    measured("now", SPEEDS)
    assert gate("now", "--against", "kept") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("fast is fastest: 1.50x [1.49, 1.51] ")
    assert lines[0].startswith("fast (fast): `speedup` at 1.00x [")
    assert lines[-1].startswith(verdict("passed", f"2 {Claim.no_difference_shown}"))
    assert lines[1].startswith("plain (plain): throughput at 1.00x ")


@pytest.mark.smoke
def test_a_failed_gate_ends_with_1_and_says_why_first(sweeps, capsys) -> None:
    measured("now", SPEEDS | {"plain": (80, 81, 79, 80)})
    assert gate("now", "--against", "results/kept", "--metric", "img/s") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain (plain): throughput at 0.80x ")
    assert lines[-1].startswith(verdict("failed", f"1 {WORSE}"))
    assert gate("now", "--against", "kept", "--tolerance", "30%", "--metric=img/s") == 0
    assert gate("now", "--against", "kept") == 1, "plain itself is slower"
    assert gate("now", "--against", "kept", "--lenient") == 0, "fast is faster than plain"


def test_a_cell_that_is_named_is_compared_with_its_baseline_alone(sweeps, capsys) -> None:
    measured("all", SPEEDS | {"other": (120, 121, 119, 120)})
    measured("now", SPEEDS | {"other": (80, 81, 79, 80)})
    assert gate("now", "--against", "all") == 1
    capsys.readouterr()
    assert gate("now", "--against", "all", "--cell", "precision=fast") == 0
    said = capsys.readouterr().out
    assert "2 comparisons" in said
    assert "other (other)" not in said
    assert gate("now", "--against", "all", "--cell", "nothing") == 2


def test_an_undecided_gate_ends_with_4_and_says_how_both_sides_are_measured_again(
    sweeps, capsys
) -> None:
    measured("now", SPEEDS | {"fast": (137, 145, 139, 143)})
    assert gate("now", "--against", "kept", "--metric", "img/s") == 4
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"`measurement.blocks=\d+ sweep.name=NAME`", said)
    assert "0123abcd" in said, "the commit of the kept code"


def test_a_parquet_of_runs_is_kept_by_copying_it(sweeps, capsys) -> None:
    collect(Store(Path("results/kept")))
    kept = Path("results/kept/runs.parquet").rename(sweeps / "baseline.parquet")
    measured("default", SPEEDS)
    assert gate("--against", str(kept), "--metric", "img/s,speedup", "--metric", "step ms") == 0
    assert "The gate passed, 5 comparisons: " in capsys.readouterr().out


def test_kept_runs_are_not_compared_with_themselves(sweeps, capsys) -> None:
    store = Store(Path("results/kept"))
    collect(store)
    kept = (store.root / "runs.parquet").rename(sweeps / "baseline.parquet")
    assert gate("kept", "--against", str(kept)) == 2
    assert "`kept`" in capsys.readouterr().err
    for cell, speed in (("plain", 100), ("fast", 120)):
        for n in range(4):
            fresh = run(cell, f"c{n}", speed + n / 2, minute=60, precision=cell, sweep="kept",
                        environment={"device": "AMD EPYC 7B13"})  # fmt: skip
            store.save_run(fresh)
    assert gate("kept", "--against", str(kept)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 of 16 runs ")
    assert lines[1].startswith("fast (fast): `speedup` at 0.80x [")


def test_a_cell_that_is_no_longer_measured_fails_the_gate(sweeps, capsys) -> None:
    store = measured("now", {"fast": SPEEDS["fast"]})
    store.save_run(run("plain", status=Status.out_of_memory, reason="No room.", precision="plain"))
    assert gate("now", "--against", "kept") == 1
    said = capsys.readouterr().out
    assert f"plain (plain): {GONE} (" in said
    assert opening("no_speedup") in said


def test_too_few_runs_and_a_lost_cell_fail_or_warn(sweeps, capsys) -> None:
    measured("few", {"fast": (150, 151), "plain": SPEEDS["plain"]})
    assert gate("few", "--against", "kept") == 1
    assert verdict("failed", f"1 {TOO_FEW}") in capsys.readouterr().out
    measured("alone", {"plain": SPEEDS["plain"]})
    assert gate("alone", "--against", "kept") == 1
    assert gate("alone", "--against", "kept", "--lenient") == 0
    assert "Warning: fast (fast): not run" in capsys.readouterr().out


BAD = {
    "no baseline named": (["now"], "required: --against"),
    "no such sweep": (["later", "--against", "kept"], "There is no sweep `later`"),
    "no such baseline": (["now", "--against", "old"], "There is no sweep `old`"),
    "no such parquet": (["now", "--against", "old.parquet"], "There is no kept baseline `old.par"),
    "no parquet": (["now", "--against", "notes.parquet"], "is not a complete parquet file"),
    "a bundle": (["now", "--against", "old.tar.gz"], "`tar xf old.tar.gz`"),
    "cells": (["now", "--against", "results/kept/cells.parquet"], "holds cells, not runs"),
    "no metric": (["now", "--against", "kept", "--metric", "speed"], "`speed` is not a metric"),
    "no tolerance": (["now", "--against", "kept", "--tolerance", "5"], "`--tolerance 5`"),
    "nothing in common": (["other", "--against", "kept"], "no cell of `--against`"),
    "too few runs": (["few", "--against", "kept", "--lenient"], "Nothing of `few`"),
    "another device": (["moved", "--against", "kept"], "ran on H200, the kept baseline on AMD"),
    "a baseline that failed": (["now", "--against", "dead"], "holds no measured run"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_compared_ends_with_2(
    sweeps: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    measured("now", SPEEDS)
    measured("other", {"bf16": (1, 1, 1)})
    measured("few", {"plain": (100, 100)})
    measured("moved", SPEEDS, device="H200")
    measured("dead", {}).save_run(run("plain", status=Status.failed, precision="plain"))
    collect(Store(Path("results/kept")))
    Path("notes.parquet").write_text("mostly text")
    assert gate(*arguments) == 2
    assert said in capsys.readouterr().err
