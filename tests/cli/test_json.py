"""`--json`: the shapes that docs/scripts.md promises."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run as run_of
from vitsweep.cli import SCHEMA
from vitsweep.cli.cells import read_line
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.results.store import Store

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"
Captured = pytest.CaptureFixture[str]


def found(capsys: Captured, *words: str, code: int = 0) -> dict[str, Any]:
    assert run([*words, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "one object alone"
    tree = json.loads(out, parse_constant=pytest.fail)
    assert tree.pop("schema") == SCHEMA == 2
    return dict(tree)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLE, tmp_path / "results" / "sample")
    return tmp_path / "results"


def test_status_and_collect(results: Path, capsys: Captured) -> None:
    tree = found(capsys, "status", "sample", code=3)
    assert {*tree} == {"sweep", "folder", "cells"}
    assert len(tree["cells"]) == 30
    assert all({*cell} == {"cell_id", "status", "reason"} for cell in tree["cells"])
    tree = found(capsys, "status", "--all")
    assert [{*each} for each in tree["sweeps"]] == [{"sweep", "last command", "cells"}]
    tree = found(capsys, "collect", "sample")
    assert {*tree} == {"sweep", "folder", "answers", "best", "cells"}
    interval = {"claim", "speedup", "claim_low", "claim_high", "family_size"}
    for named in tree["best"]:
        assert {*named} == {"baseline_cell_id", "cell_ids", "best"}
        assert {*named["best"]} == {"cell_id"} | interval
        assert (named["best"]["claim"] == "faster") is bool(named["cell_ids"])
    first = (results / "sample" / "cells.csv").read_text().partition("\n")[0].split(",")
    assert [*tree["cells"][0]] == first
    whole = tree["cells"]
    tree = found(capsys, "collect", "sample", "--columns", "cell,img/s,speedup")
    assert [*tree["cells"][0]] == ["cell", "images_per_second", "speedup"]
    assert any(isinstance(cell["images_per_second"], float) for cell in tree["cells"])
    best = max(cell["speedup"] or 0.0 for cell in tree["cells"])
    listed = found(capsys, "collect", "sample", "--columns", "speedup")["cells"]
    assert whole[0]["speedup"] == listed[0]["speedup"] == best, "in the order of the table"
    assert run(["collect", "sample", "--columns", "speedup", "--rows", "1"]) == 0
    assert capsys.readouterr().out.split()[-1] == f"{best:.4g}"
    assert run(["collect", "nosuch", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_plan(results: Path, capsys: Captured) -> None:
    tree = found(capsys, "plan", "-m", "precision=O1,O2", "--no-predict")
    assert {*tree} == {"sweep", "cells"}
    promised = set("cell_id cell settings state runs is_baseline reasons overrides".split())
    assert all(promised <= {*cell} for cell in tree["cells"])


def test_gate(results: Path, capsys: Captured) -> None:
    for name, speed in (("kept", 100.0), ("now", 50.0)):
        store = Store(results / name).create()
        for block in range(5):
            for cell, factor in (("base", 1.0), ("cell", speed / 100)):
                store.save_run(run_of(cell, f"{name}{block}", 100 * factor + block / 9, sweep=name))
        store.append_command(
            {"cells": ["base", "cell"], "baselines": {"base": None, "cell": "base"}}
        )
    tree = found(capsys, "gate", "now", "--against", "kept", code=1)
    assert {*tree} == {"gate", "sentences", "cells"}
    assert tree["gate"] == "failed"
    assert all({"cell_id", "metric", "verdict", "fails"} <= {*cell} for cell in tree["cells"])


def test_a_quiet_command_still_refuses_a_word_that_it_does_not_know() -> None:
    with pytest.raises(VitsweepError, match="`plna` is neither"):
        read_line(["-q", "plna"])


PRINTS = """
import os, subprocess
from vitsweep.cli import print_json, result_alone
with result_alone():
    os.write(1, b"of C ")
    print_json(cells=[])
    subprocess.run(["echo", "of a process"])
    print("of Python", flush=True)
"""


def test_what_c_and_other_processes_print_goes_to_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"schema": SCHEMA, "cells": []}
    assert done.stderr == "of C of a process\nof Python\n"
