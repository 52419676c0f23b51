"""The table of verbs: help and documentation follow it, and each verb refuses what it does not take."""

from pathlib import Path

import pytest

from tests.extras import ABSENT_VERBS
from vitsweep.cli import VERBS
from vitsweep.cli.main import run
from vitsweep.cli.show import usage


def test_every_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert f"python -m vitsweep {verb} " in usage()
        assert VERBS[verb].summary in " ".join(usage().split())
        try:
            code = run([verb, "--help"])
        except SystemExit as left:
            code = left.code
        assert code == 0
        assert f"python -m vitsweep {verb}" in capsys.readouterr().out
        typed = VERBS[verb].parser().format_usage()
        assert all(len(line) <= 80 for line in typed.splitlines())


def test_what_is_mistyped_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in [
        (["status", "--wach"], "--wach"),
        (["collect", "--synch"], "--synch"),
        (["report", "one", "two", "three"], "three"),
        (["cancel", "--yes"], "--yes"),
        (["retry", "--statsu", "failed"], "--statsu"),
        (["retry", "one", "two"], "`one` and `two`"),
        (["plna", "-m", "precision=O1"], "did you mean `python -m vitsweep plan`?"),
        (["status", "--sweep", "u"], "type its name alone: `status SWEEP`."),
        (["-m", "hydra/launcher=slurm", "hydra.launcher.partition=a,b"], """.partition="a,b"'`."""),
        (["-m", "hydra/launcher=slurm_mine"], "copy `conf/hydra/launcher/slurm_example_site.yaml`"),
        (["-m", "precision=O1,", "O2"], "`precision=O1,O2`"),
        (["-m", "precision", "O1"], "`precision` has no value: type `precision=...`"),
        (["precision=O1,O2"], "add `-m`"),
        (["sweep=5"], "`python -m vitsweep show sweep` lists all"),
        (["+sweep=5"], "`python -m vitsweep show sweep` lists all"),
        (["-m", "+sweep=meta_speedup"], "did you mean `+sweep=meta_speedups`?"),
        (["hydra.sweep.dir=/x"], "`sweep.folder`/`sweep.name`"),
        (["--config-dir", "conf", "plan"], "The verb comes first"),
    ]:
        assert run(words) == 2
        assert said in capsys.readouterr().err


def test_the_version_is_that_of_vitsweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vitsweep ")


def test_every_verb_is_in_the_table_of_commands_and_no_other() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "commands.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `python -m vitsweep ")]
    first_words = {row.split("`")[1].split()[3] for row in rows}
    assert {word for word in first_words if word.isalpha()} == {*VERBS, *ABSENT_VERBS}


def test_usage_lines_fit_a_terminal() -> None:
    assert max(map(len, usage().splitlines())) <= 140
