"""What was meant by a name that does not exist, and numbers that were typed with a unit."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

YES = ("true", "1", "yes", "on")
"""Values of a switch of another program, whose name says more than they."""


@cache
def _table() -> Mapping[str, Mapping[str, list[str]]]:
    import yaml  # for a mistake alone

    text = files("vitsweep").joinpath("words.yaml").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, list[str]]] = yaml.load(
        text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return table


def gone_names() -> Mapping[str, str]:
    """Return what earlier versions had, as typed -> what to use instead."""
    names: Mapping[str, str] = _table()["gone"]  # type: ignore[assignment]
    return names


def gone(typed: str) -> str:
    """Say what to use instead of a name that earlier versions had; nothing for any other."""
    names = {plain(name): name for name in gone_names()}
    name = next(
        (names[p] for n in (typed, typed.partition("=")[0]) if (p := plain(n)) in names), ""
    )
    return f"; `{name}` was left out: {gone_names()[name]}." if name else ""


@cache
def plain(text: str) -> str:
    """Return a name without what people write in different ways: capitals, blanks, `-`, `_`, `.`, `/`."""
    return re.sub(r"[-_/. ]", "", text.lower())


def suggestions(typed: str, rest: str = "") -> list[str]:
    """Return what the field's words for something are here, each with its label (`label: words`).

    Args:
        typed: `key=value`, `--hardware name`, an option with or without a value, or a word alone.
        rest: the other words of the line, for an answer that is a verb.
    """
    text = typed.removeprefix("python -m vitsweep ").lstrip("+~")
    key, equals, value = text.replace("--hardware ", "--hardware=").partition("=")
    last = key.lstrip("-").rpartition(".")[2]
    table, names = _table(), {plain(key.lstrip("-")), plain(last)}
    answers = [] if equals else _listed("verbs", names, rest)
    if equals and value:
        answers += _listed("settings", {plain(key.lstrip("-"))}, value) or _listed(
            "settings", names, value
        )
        groups = [
            group
            for group, others in table["groups"].items()
            if names & {plain(other) for other in (group, *others)} and group != key
        ]
        for group in (key, *groups):
            is_said = "." in key or group in (key, "--hardware") or value.lower() in YES
            own = [] if is_said else [f"{group}={value}"]
            answers += _chosen(group, value) or own
    if not answers and (value.lower() in YES or not equals):
        answers = [a for name in names for a in _chosen("", name)]
    exact = [
        a for a in table["choices"] if plain(f"{last}={value}") in map(plain, table["choices"][a])
    ]
    found = dict.fromkeys(exact or [" ".join(answer.split()) for answer in answers])
    return [answer for answer in found if answer != typed]


def _listed(section: str, names: Collection[str], value: str) -> list[str]:
    found = (a for a, others in _table()[section].items() if {*names} & {plain(o) for o in others})
    return [answer.replace("*", value) for answer in found]


def _chosen(group: str, value: str) -> list[str]:
    """Return the choices of a group, or of any (""), that a value names, exactly or else by a pattern."""
    sign = " " if group == "--hardware" else "="
    own = {
        answer: [plain(name) for name in (*names, answer.partition("=")[2])]
        for answer, names in _table()["choices"].items()
        if not group or _words(answer).startswith(f"{group}{sign}")
    }
    exact = [a for a, names in own.items() if plain(value) in names]
    if not group:
        return exact
    fits = [a for a, names in own.items() if any(fnmatchcase(plain(value), n) for n in names)]
    return [answer.replace("*", value) for answer in exact or fits[:1]]


def _words(answer: str) -> str:
    """Return the words to type of an answer."""
    label, colon, words = answer.partition(": ")
    return words if colon else label


def did_you_mean(
    word: str,
    valid: Iterable[str],
    as_typed: Callable[[str], str],
    otherwise: str = "",
    fits: Callable[[str], bool] = lambda words: True,
    rest: str = "",
) -> str:
    """Return the end of a sentence that refuses a word: what was meant, or what there is.

    Args:
        word: that is unknown.
        valid: what stands in its place.
        as_typed: writes one of these as the line has it.
        otherwise: what to say where nothing is close.
        fits: whether what would be suggested can be typed; what cannot is left out.
        rest: the other words of the line, for an answer that is a verb.
    """
    if instead := gone(as_typed(word)):
        return instead
    by_letters = {plain(name): name for name in valid}
    same = [by_letters[plain(word)]] if plain(word) in by_letters else []
    answers = [as_typed(name) for name in same] or suggestions(as_typed(word), rest)
    if instead := next(filter(None, map(gone, answers)), ""):
        return instead
    answers = [answer for answer in answers if fits(_words(answer))]
    if not answers and plain(word):
        close = get_close_matches(plain(word), by_letters, n=1, cutoff=0.7)
        answers = [typed for name in close if fits(typed := as_typed(by_letters[name]))]
    if not answers:
        return f"; {otherwise}." if otherwise else "."
    return f"; did you mean {' or '.join(_shown(answers))}?"


def _shown(answers: list[str]) -> Iterator[str]:
    """Yield words in backticks; their labels are shown where there are several."""
    for answer in answers:
        label = answer.removesuffix(_words(answer)) if len(answers) > 1 else ""
        yield f"{label}`{_words(answer)}`"


# Numbers with a unit, read where the key names one.

_TIMES = {"ms": 1e-3, "s": 1, "sec": 1, "second": 1, "min": 60, "m": 60, "minute": 60, "h": 3600, "hr": 3600,
          "hour": 3600, "d": 86400, "day": 86400}  # fmt: skip
_BYTES = {f"{prefix}{unit}": base**power for unit, base in (("b", 1000), ("ib", 1024))
          for power, prefix in enumerate(("k", "m", "g", "t"), 1)}  # fmt: skip
_KINDS: tuple[tuple[Mapping[str, float], tuple[str, ...]], ...] = (
    (_TIMES, ("ms", "s", "seconds", "min", "minutes", "hours")),
    (_BYTES, ("mib", "gib", "gb")),
    ({"px": 1, "pixel": 1}, ("px",)),
)
_SHARES = re.compile(
    r"(.*[._])?(indifference|within|share|probability|smoothing|target_accuracy)|--width"
)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?) ?([A-Za-z]+|%)")


def plain_number(key: str, text: str) -> str:
    """Return a number with a unit as the plain number that a setting takes; anything else as it is.

    Args:
        key: of the setting or option; the last part of its name says its unit (`timeout_min`,
            `memory_gib_per_rank`).
        text: as typed, such as `2h` or `5%`.
    """
    if clock := _CLOCK.fullmatch(text):  # of Slurm: [days-]hours:minutes:seconds
        parts = zip(clock.groups(), (86400, 3600, 60, 1), strict=True)
        return plain_number(key, f"{sum(int(part or 0) * size for part, size in parts)}s")
    found = _NUMBER.fullmatch(text)
    if not found:
        return text
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return _written(number / 100) if _SHARES.fullmatch(key) else text
    own = re.sub(r"_per_\w+$", "", key.rpartition(".")[2]).rpartition("_")[2].lstrip("-")
    for units, of_keys in _KINDS:
        size = units.get(unit) or units.get(unit.removesuffix("s"))
        if own in of_keys and size:
            return _written(number * size / (units.get(own) or units[own.removesuffix("s")]))
    return text


def _written(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def without_units(override: str) -> str:
    """Return an override with the numbers of its values plain, such as `sweep.minutes=120` for `2h`."""
    key, equals, value = override.partition("=")
    if not equals or key.startswith("-") or not value[:1].isdigit():
        return override
    return f"{key}={','.join(plain_number(key.lstrip('+'), part) for part in value.split(','))}"
