"""`vitsweep explain` as a user types it."""

import errno
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import vitsweep
from tests.cells import TINY, entry
from tests.command import QUICK
from tests.said import opening
from tests.small_disk import fill, small_disk
from tests.traced import traced_sweep
from vitsweep.cli.main import run as front_door
from vitsweep.errors import VitsweepError
from vitsweep.execution.code_hash import code_of
from vitsweep.results.store import Store
from vitsweep.tables.stats import Claim

ARMS = ("optimizer=adamw_fused", "optimizer=adamw_loop")
LONE = (*QUICK, "resources.ranks_per_node=1", "sharding=none")


def explain(*arguments: str) -> int:
    return front_door(["explain", *arguments])


def test_traced_runs_of_a_cell_have_the_code_of_others() -> None:
    """Else they would be a group of their own, and `explain` would change the claims of the sweep."""
    plain, traced = (
        code_of(entry(*TINY, f"measurement.traced_steps={n}").spec).files for n in (0, 2)
    )
    assert plain == traced
    assert not any("extras" in name for name in plain), "a verb's words are code of no cell"


def test_a_pair_is_measured_once_and_then_explained_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert explain(*ARMS, *LONE, "--blocks=1", "--steps=2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"cause", "ms", "low", "high"} <= found["causes"][0].keys()
    causes = {row["cause"]: row for row in found["causes"]}
    assert list(causes)[-2:] == ["tracing itself", "rest"]
    assert sum(row["ms"] for row in found["causes"]) == pytest.approx(found["difference_ms"])
    assert causes["optimizer"]["launches"] < -100  # one fused kernel for the loop's many

    runs = len(list(Store(tmp_path / "results" / "compare").runs()))
    assert explain("adamw_fused", "adamw_loop", "--sweep=compare", "--blocks=1") == 0
    told = capsys.readouterr().out
    assert "measured difference" in told
    assert re.search(rf"\(no interval\).* 1 block, {Claim.too_few_blocks}; ", told)
    assert len(list(Store(tmp_path / "results" / "compare").runs())) == runs == 2, "nothing ran"
    page = (tmp_path / "results" / "compare" / "report" / "index.html").read_text()
    assert '<figure id="causes"' in page
    assert f"{Claim.too_few_blocks}; " in page

    answer = vitsweep.load("compare").explain("optimizer=adamw_fused", "adamw_loop")
    assert answer.table["ms"].sum() == pytest.approx(found["difference_ms"])
    assert answer.figure.axes
    with pytest.raises(VitsweepError, match=r"`adamw_loop` .*`adamw_loop`"):
        vitsweep.load("compare").explain("adamw_loop", "adamw_loop")

    assert explain("adamw_loop", "--sweep=compare", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert [row["phase"] for row in alone["phases"]] == ["forward", "backward", "optimizer"]
    assert all(row["flops"] > 0 for row in alone["phases"])


@pytest.mark.smoke
def test_three_traced_blocks_of_a_sweep_are_explained_without_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = traced_sweep(tmp_path / "results" / "mine")
    assert explain("adamw_fused", "adamw_loop") == explain("adamw_loop") == 0
    told = capsys.readouterr()
    assert opening("largest_cause", blocks=5, cause="-7.00 ms optimizer") in told.out
    assert "3 of 5 blocks have traces of both; `--blocks 5` " in told.out
    assert re.search(rf"{opening('roofs')}.*record; no memory", told.out)
    assert told.err.count("Sweep `mine`, the latest.") == 2
    assert len(list(store.runs())) == 6
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["mine"], "nothing ran"


def test_a_folder_that_takes_no_report_still_gets_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        traced_sweep(disk / "mine", blocks=5)
        fill(disk / "filler")
        assert explain("aa", "bb", f"--sweep={disk / 'mine'}") == 2
        assert explain("aa", f"--sweep={disk / 'mine'}") == 2
    told = capsys.readouterr()
    assert "faster; -7.00 ms [-7.00, -7.00] optimizer." in told.out
    assert opening("roofs") in told.out
    assert told.err.count(os.strerror(errno.ENOSPC)) == 2


def test_ctrl_c_before_the_first_pair_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    endless = "measurement.measured_steps=100000"

    def ctrl_c() -> None:
        while not list(tmp_path.glob("results/compare/cells/*/attempts/*/rank0.log")):
            time.sleep(0.05)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=ctrl_c, daemon=True).start()
    assert explain(*ARMS, *LONE, endless, "--blocks=1") == 130
    assert "Stopped." in capsys.readouterr().err


REFUSED = {
    "no setting": ([], "needs two settings or cells"),
    "one setting without a sweep": (["precision=O1"], "There is no sweep"),
    "no block": (["seed=1", "seed=2", "--blocks=0"], "`--blocks 0` must be from 1 to 10,000"),
    "no step": (["seed=1", "seed=2", "--steps=0"], "`--steps 0` must be from 1 to 100"),
    "no budget": (["seed=1", "seed=2", "--minutes=0"], "`--minutes 0` must be a number above 0"),
    "an option of pairs": (["O2", "--operators=3"], "`--operators` is for two cells or settings"),
    "no sweep": (["O2", "fp32", "--sweep=other"], "There is no sweep `other`"),
    "a cell of no sweep": (["O2", "fp32"], "There is no sweep"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_reported_before_anything_is_made(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert explain(*arguments) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
