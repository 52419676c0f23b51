"""`vitsweep explain` as a user types it."""

import json
from pathlib import Path

import pytest

import vitsweep
from tests.command import QUICK
from vitsweep.cli.main import run as front_door
from vitsweep.errors import VitsweepError
from vitsweep.results.store import Store

ARMS = ("optimizer=adamw_fused", "optimizer=adamw_loop")
LONE = (*QUICK, "resources.ranks_per_node=1", "sharding=none")


def explain(*arguments: str) -> int:
    return front_door(["explain", *arguments], {})


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
    assert "over 1 block, too few for an interval." in told
    assert len(list(Store(tmp_path / "results" / "compare").runs())) == runs == 2, "nothing ran"
    page = (tmp_path / "results" / "compare" / "report" / "index.html").read_text()
    assert '<figure id="causes"' in page
    assert "too few for an interval" in page

    answer = vitsweep.load("compare").explain("optimizer=adamw_fused", "adamw_loop")
    assert answer.table["ms"].sum() == pytest.approx(found["difference_ms"])
    assert answer.figure.axes
    with pytest.raises(VitsweepError, match="are the same cell"):
        vitsweep.load("compare").explain("adamw_loop", "adamw_loop")

    assert explain("adamw_loop", "--sweep=compare", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["step_ms"] == pytest.approx(sum(row["ms"] for row in alone["causes"]))


REFUSED = {
    "no setting": ([], "needs two settings or cells"),
    "one setting without a sweep": (["precision=O1"], "There is no sweep"),
    "no block": (["seed=1", "seed=2", "--blocks=0"], "`--blocks 0` must be from 1 to 10,000"),
    "no step": (["seed=1", "seed=2", "--steps=0"], "`--steps 0` must be from 1 to 100"),
    "no budget": (["seed=1", "seed=2", "--minutes=0"], "`--minutes 0` must be a number above 0"),
    "an option of pairs": (["O2", "--modules"], "`--modules` is for two cells or settings"),
    "no sweep": (["O2", "fp32", "--sweep=other"], "There is no sweep `other`"),
    "a cell of no sweep": (["O2", "fp32"], "There is no sweep"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_told_before_anything_is_made(
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
