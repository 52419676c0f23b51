"""The menu shows what conf/ holds."""

from vitsweep.cli.help import first_comment, menu
from vitsweep.composition.conf_dir import conf_dir


def test_every_choice_of_every_group_is_shown_with_a_comment() -> None:
    lines = menu().splitlines()
    for path in conf_dir().rglob("*/*.yaml"):
        [line] = [x for x in lines if path.stem in x.split()[:2] and first_comment(path) in x]
        assert first_comment(path), f"{path} begins without a comment"
        assert len(line) <= 130


def test_defaults_are_marked() -> None:
    assert "   * fp32" in menu()
    assert "   * digits" in menu()
    assert "     O1" in menu()
