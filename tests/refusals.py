"""What a refusal says, without its wording: its form, and the settings, values and ways out that it names."""

import re

CODE = re.compile(r"`[^`]*`")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")


def named(text: str) -> set[str]:
    """Return what a text names: each code in its backquotes, and the numbers outside of them."""
    numbers = NUMBER.findall(CODE.sub(" ", text))
    return {*CODE.findall(text), *(number.removesuffix(".0") for number in numbers)}


def require(said: str, names: str = "") -> None:
    """Require the form of a refusal, and that it names what `names` does.

    Each line names a setting, a choice or a file in backquotes, states a rule, and is whole sentences.
    """
    for line in said.splitlines():
        assert CODE.search(line), line
        assert len(CODE.sub("", line).split()) >= 2, f"no rule: {line}"
        assert line.endswith((".", "?")), line
        assert line.count("`") % 2 == 0, line
        assert "Traceback" not in line
        assert "https://" not in line
    assert named(names) <= named(said), f"{named(names) - named(said)} not named in: {said}"
