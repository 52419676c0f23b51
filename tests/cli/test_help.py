"""Help and `show` tell what conf/ holds, within 80 columns."""

import pytest

from vitsweep.cli import show
from vitsweep.cli.show import menu, shown_choice, shown_group, usage
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import choices, comment, conf_dir, groups


def test_help_fits_80_columns() -> None:
    assert max(map(len, f"{usage()}\n{menu()}".splitlines())) <= 80


def test_every_group_has_its_default_and_the_number_of_its_choices() -> None:
    lines = [line.split() for line in menu().splitlines()]
    for name, group in ((n, g) for n, g in groups().items() if choices(n)):
        assert [f"{name}={group.plain}", str(len(choices(name)))] in [line[:2] for line in lines]


def test_show_tells_all_that_the_files_say_the_default_choice_marked() -> None:
    for group in ("precision", "optimizer", "sweep"):
        text = shown_group(group)
        said = " ".join(text.split())
        for name in choices(group):
            assert (words := comment(group, name)), (
                f"{conf_dir()}/{group}/{name} begins without a comment"
            )
            assert "@" not in words
            assert f"{name} {' '.join(words.split())}" in said
        assert max(map(len, text.splitlines())) <= 80
    assert "* fp32" in shown_group("precision")


def test_show_of_a_choice_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.run(["precision=O2", "sweep=first"]) == 0
    printed = capsys.readouterr().out
    assert "master_weights: true" in printed
    assert "+sweep=first" in printed
    begun = "cast_model_type: half         # dtype of parameters and gradients in forward and"
    assert f"{begun}\n{' ' * 30}# backward; null: float32\n" in printed
    assert max(len(line) for line in printed.splitlines() if "# " in line) <= 80


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("precison", "did you mean `python -m vitsweep show precision`?"),
        ("precision=fp31", "did you mean `precision=fp32`?"),
        ("model.block", "there is no group `model.block`"),
        ("../x", "`../x`"),
    ],
)
def test_what_there_is_not_is_refused(typed: str, told: str) -> None:
    with pytest.raises(BadValueError) as error:
        show.run([typed])
    assert told in str(error.value)


def test_the_default_choice_comes_first_then_the_numbered_ones_then_the_others_by_name() -> None:
    assert choices("precision")[:3] == ("fp32", "O1", "O2")
    assert choices("precision")[-1] == "O0"
    assert choices("recipe") == ("none", *sorted({*choices("recipe")} - {"none"}))
    assert choices("of_a_plugin") == ()


def test_the_file_of_each_choice_is_shown_with_its_keys() -> None:
    for group in groups():
        for choice in choices(group):
            text = (conf_dir() / group / f"{choice}.yaml").read_text()
            lines = [line.partition("  # ")[0].rstrip() for line in text.splitlines()]
            keys = [line for line in lines if line and not line.startswith(("#", "_target_"))]
            shown = shown_choice(group, choice).splitlines()
            assert shown[0] == f"{group}={choice}"
            assert [key for key in keys if not any(s.startswith(key) for s in shown)] == []
