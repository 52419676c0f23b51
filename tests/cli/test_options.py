"""Options of the verbs: numbers within bounds, files that can be written, what is unknown; and JSON."""

import json
from enum import StrEnum
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vitsweep.cli import Options, Verb, print_json, require_writable
from vitsweep.errors import BadValueError, VitsweepError


class Colour(StrEnum):
    red = "red"


@pytest.fixture
def options() -> Options:
    options = Options(Verb("draw", "draw it"))
    options.add_sweep()
    options.add_config_dir()
    options.flag("-a", "--all", help="")
    options.number("--above", 1.0, "")
    options.number("--least", 5, "", least=0)
    options.number("--both", 0.5, "", least=0, most=1)
    options.number("--most", 0.5, "", most=1)
    return options


def test_a_number_keeps_its_type_and_its_bounds(options: Options) -> None:
    plain = vars(options.read([]))
    assert (plain["above"], plain["least"], plain["both"], plain["most"]) == (1.0, 5, 0.5, 0.5)
    for option, good, bad, rule in (
        ("--above", "0.001 2 1e9", "0 -1 inf nan", ["0"]),
        ("--least", "0 1 1000000", "-1", ["0"]),
        ("--both", "0 0.001 1", "-0.1 1.01", ["0", "1"]),
        ("--most", "0.001 1", "0 1.01 -1", ["0", "1"]),
    ):
        for text in good.split():
            read = vars(options.read([f"{option}={text}"]))[option[2:]]
            assert read == float(text)
            assert type(read) is type(plain[option[2:]])
        for text in bad.split():
            with pytest.raises(BadValueError, match=f"^`{option} {text}`") as refused:
                options.read([f"{option}={text}"])
            words = str(refused.value).partition("must be")[2].replace(",", "").rstrip(".").split()
            assert [word for word in words if word.isdecimal()] == rule
    with pytest.raises(VitsweepError, match=r"int .*2\.5"):
        options.read(["--least", "2.5"])


def test_options_stand_anywhere_and_unknown_ones_are_refused_first(options: Options) -> None:
    for words in (["--all", "mine"], ["mine", "-a"], ["--", "mine", "--all"]):
        read = options.read(words)
        assert (read.sweep, read.all, read.config_dir) == ("mine", True, None)
    assert options.read(["--config-dir", "x"]).config_dir == "x"
    for typed, told in (
        (["--al"], "; did you mean `--all`?"),
        (["--al=1", "--least", "x"], "; did you mean `--all`?"),
        (["--unheard-of"], "Unrecognized arguments: --unheard-of. `draw`: draw it."),
        (["one", "two"], "Unrecognized arguments: two"),
    ):
        with pytest.raises(VitsweepError) as refused:
            options.read(typed)
        first, usage = str(refused.value).split("\n", 1)
        assert first.endswith(told)
        assert usage.startswith("usage: python -m vitsweep draw")


def test_a_file_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    there, kept = tmp_path / "there.csv", tmp_path / "kept"
    there.touch()
    kept.mkdir()
    for file in (there, tmp_path / "new.csv"):
        require_writable("--out", file)
    for file in (tmp_path, tmp_path / "none" / "new.csv", there / "new.csv"):
        with pytest.raises(BadValueError, match=f"^`--out {file}` "):
            require_writable("--out", file)


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere: what the system answers stands in."""
    there = tmp_path / "there.csv"
    there.touch()
    for denied, refused in ((there, there), (tmp_path, tmp_path / "new.csv")):
        monkeypatch.setattr("os.access", lambda path, mode, denied=denied: Path(path) != denied)
        with pytest.raises(BadValueError, match=f"^`--out {refused}` "):
            require_writable("--out", refused)
        require_writable("--out", there if refused != there else tmp_path / "new.csv")


def test_json_has_plain_values_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        whole=np.int64(3), half=np.float32(0.5), yes=np.bool_(True), none=None, word="a", no=False,
        lost=[float("nan"), float("inf"), np.float64("-inf"), pd.NA, pd.NaT], pair=(1, 2.5),
        few={7}, inner={1: {"a": Path("x/y")}}, kind=Colour.red, day=pd.Timestamp("2026-10-20"),
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "schema": 2, "whole": 3, "half": 0.5, "yes": True, "none": None, "word": "a", "no": False,
        "lost": [None] * 5, "pair": [1, 2.5], "few": [7], "inner": {"1": {"a": "x/y"}},
        "kind": "red", "day": "2026-10-20 00:00:00",
    }  # fmt: skip
