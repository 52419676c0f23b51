"""The menu shows what conf/ holds."""

from vitsweep.cli.help import menu
from vitsweep.spec.menu import choices, comment, conf_dir


def test_every_choice_of_every_group_is_shown_with_a_comment() -> None:
    lines = menu().splitlines()
    for path in conf_dir().rglob("*/*.yaml"):
        said = comment(str(path.parent.relative_to(conf_dir())), path.stem)
        assert said, f"{path} begins without a comment"
        assert "@" not in said
        shown = said if len(said) <= 100 else said[:70]
        [line] = [x for x in lines if path.stem in x.split()[:2] and shown in x]
        assert len(line) <= 130


def test_the_plain_choice_comes_first_then_the_numbered_ones_then_the_others_by_name() -> None:
    assert choices("precision")[:3] == ("fp32", "O1", "O2")
    assert choices("precision")[-1] == "O0"
    assert choices("recipe") == ("none", *sorted({*choices("recipe")} - {"none"}))
    assert choices("of_a_plugin") == ()


def test_defaults_are_marked() -> None:
    assert "   * fp32" in menu()
    assert "   * digits" in menu()
    assert "     O1" in menu()
