"""What is mistyped before anything runs: each verb says what it takes, nothing is ignored."""

import pytest

from vitsweep.cli.main import USAGE, run
from vitsweep.cli.verbs import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"python -m vitsweep {verb} " in USAGE
    try:
        code = run([verb, "--help"], {})
    except SystemExit as left:
        code = left.code
    assert code == 0
    assert f"python -m vitsweep {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "--wach"], "--wach"),
        (["collect", "--synch"], "--synch"),
        (["report", "one", "two"], "two"),
        (["doctor", "--all"], "--all"),
        (["cancel", "--yes"], "--yes"),
        (["retry", "--statsu", "failed"], "--statsu"),
        (["retry", "one", "two"], "`one` and `two`"),
        (["plna", "-m", "precision=O1"], "Did you mean `python -m vitsweep plan`?"),
        (["-m", "precision=O1,", "O2"], "`precision=O1,O2`"),
        (["-m", "precision", "O1"], "`precision` is neither an override"),
        (["precision=O1,O2"], "add `-m`"),
    ],
)
def test_what_is_mistyped_is_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, {}) == 2
    assert said in capsys.readouterr().err


def test_the_version_is_that_of_vitsweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], {}) == 0
    assert capsys.readouterr().out.startswith("vitsweep ")
