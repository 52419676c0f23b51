"""Names that are gone: each is told what stands in for it, and is not there any more."""

from pathlib import Path

from vitsweep.cli.verbs import VERBS
from vitsweep.errors import did_you_mean, gone_names
from vitsweep.spec.menu import choices

LEFT_OUT = (Path(__file__).parents[1] / "docs" / "left_out.md").read_text()


def test_names_that_are_gone_are_few_and_stand_in_the_page_of_what_is_left_out() -> None:
    assert len(gone_names()) <= 40
    for name, instead in gone_names().items():
        assert name.removeprefix("python -m vitsweep ") in LEFT_OUT, name
        assert instead.strip() == instead
        assert not instead.endswith(".")


def test_no_name_that_is_gone_is_there() -> None:
    options = {o for v in VERBS.values() for o in v.parser()._option_string_actions}
    for name in gone_names():
        group, _, choice = name.partition("=")
        assert choice not in choices(group)
        assert name not in options
        assert name.removeprefix("python -m vitsweep ") not in VERBS


def test_a_name_that_is_gone_is_told_before_one_that_is_close() -> None:
    told = did_you_mean("glyphs", ["glyph"], lambda name: f"data={name}")
    assert told == f" `data=glyphs` was left out: {gone_names()['data=glyphs']}."
    assert did_you_mean("glyphs", ["glyph"], lambda name: f"mine={name}").startswith(
        " Did you mean"
    )
