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
    table = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for part in (part for section, part in table.items() if section != "gone"):
        part.update((answer, str(names).split(", ")) for answer, names in part.items())
    read: Mapping[str, Mapping[str, list[str]]] = table
    return read


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
    return f"; vitsweep has no `{name}`: {gone_names()[name]}." if name else ""


def with_launcher_typed(said: str, arguments: Iterable[str]) -> str:
    """Return what is said without the `hydra/launcher=slurm` of a suggestion, where a profile was typed."""
    if not any(word.startswith("hydra/launcher=slurm") for word in arguments):
        return said
    kept = re.sub(
        "(?<=`)hydra/launcher=slurm (?=[+]?hydra[.])| hydra/launcher=slurm(?=`)", "", said
    )
    return re.sub(r"(?:\w+: )?(`[^`]+`) or \1", r"\1", kept)


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
    if number := spelled(value):
        return [f"{key}={number}"]
    if "*" in value:
        return [f"'{key}=glob({value})'"]
    answers = _listed("verbs", names, rest)
    answers = [a for a in answers if (key[:1] == "-" if a[:1] == "-" else not equals)]
    if equals and value:
        whole = _listed("settings", {plain(key.lstrip("-"))}, value)
        answers += whole or _listed("settings", names, value)
        groups = [g for g in _groups(names) if g != key and not (whole and "." in key)]
        for group in (key, *groups):
            is_said = "." in key or group in (key, "--hardware") or value.lower() in YES
            own = [] if is_said else [f"{group}={value}"]
            answers += _chosen(group, value) or own
    if not answers and (value.lower() in YES or not equals):
        answers = [a for name in names for a in _chosen("", name)]
    pairs = [plain(f"{n.lstrip('-')}={value or YES[0]}") for n in (key, last)]
    choices = table["choices"].items()
    exact = [a for a, others in choices if _fits(pairs, [plain(o) for o in others if "=" in o])]
    found = dict.fromkeys(exact or [" ".join(map(without_units, a.split())) for a in answers])
    return [answer for answer in found if answer != typed]


def spelled(word: str) -> str:
    """Return the digits of a number in letters, such as `three`; nothing of any other word."""
    numbers = _table()["numbers"].items()
    return next((digits for digits, names in numbers if word.lower() in names), "")


def _groups(names: Collection[str]) -> list[str]:
    """Return the groups that a name may mean."""
    known = _table()["groups"].items()
    return [group for group, others in known if {*names} & {plain(o) for o in (group, *others)}]


def _listed(section: str, names: Collection[str], value: str) -> list[str]:
    found = (a for a, others in _table()[section].items() if {*names} & {plain(o) for o in others})
    left = f"{1 - float(value):g}" if _SHARE.fullmatch(value) else "..."
    return [answer.replace("1-*", left).replace("*", value) for answer in found]


def _chosen(group: str, value: str) -> list[str]:
    """Return the choices of a group, or of any (""), that a value names, exactly or else by a pattern."""
    sign = " " if group == "--hardware" else "="
    own = {
        answer: [
            n if "*." in n or "*/" in n else plain(n) for n in (*names, answer.partition("=")[2])
        ]
        for answer, names in _table()["choices"].items()
        if not group or _words(answer).lstrip("+").startswith(f"{group}{sign}")
    }
    exact = [a for a, names in own.items() if plain(value) in names]
    if not group:  # a named sweep is no choice of a cell
        return [answer for answer in exact if answer[:1] != "+"]
    fits = [a for a, names in own.items() if _fits((plain(value), value.lower()), names)]
    return [answer.replace("*", value) for answer in exact or fits[:1]]


def _fits(texts: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)


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
        valid: what stands there instead.
        as_typed: writes one of these as the line has it.
        otherwise: what to say where nothing is close.
        fits: whether what would be suggested can be typed; what cannot is left out.
        rest: the other words of the line, for an answer that is a verb.
    """
    if instead := gone(as_typed(word)):
        return instead
    for answers in _tried(word, valid, as_typed, rest):
        if instead := next(filter(None, map(gone, answers)), ""):
            return instead
        found = {f" {_words(a)} ": a for a in answers if fits(_words(a))}
        within = [(o, w) for w in found for o in found if o != w and o in w]
        longer = {w for o, w in within if "=..." in w or w.endswith(o)}
        if answers := [a for w, a in found.items() if w not in longer]:
            return f"; did you mean {' or '.join(_shown(answers))}?"
    last = plain(as_typed(word).partition("=")[0].lstrip("-").rpartition(".")[2])
    if "show`" in otherwise and (groups := [*filter(str.isidentifier, _groups({last}))]):
        otherwise = otherwise.replace("show`", f"show {groups[0]}`")  # which are few
    return f"; {otherwise}." if otherwise else "."


def _tried(
    word: str, valid: Iterable[str], as_typed: Callable[[str], str], rest: str
) -> Iterator[list[str]]:
    """Yield what may be meant, the likeliest first: the same letters, the field's words, close letters."""
    by_letters = {plain(name): name for name in valid}
    if plain(word) in by_letters:
        yield [as_typed(by_letters[plain(word)])]
    many, near = (get_close_matches(plain(word), by_letters, 1, cutoff) for cutoff in (0.9, 0.7))
    # a name of the same place that begins with it, or holds it
    start = as_typed(word).partition(word)[0] if word else ""
    longer = [n for n, name in by_letters.items() if as_typed(name).startswith(start)]
    longer = [n for n in longer if plain(word) in n and len(word) > 2]
    longer = [n for n in longer if n.startswith(plain(word))] or longer
    near = longer if len(longer) == 1 else near
    yield from ([as_typed(by_letters[name])] for name in many)
    for typed in (as_typed(word), *(as_typed(by_letters[name]) for name in near)):
        yield [typed] if typed != as_typed(word) else []
        yield suggestions(typed, rest)
        yield _each(typed, by_letters)
    yield _elsewhere(as_typed(word), rest)


def _each(typed: str, by_letters: Mapping[str, str]) -> list[str]:
    """Return what several values mean, each as one choice of the same group."""
    key, _, value = typed.partition("=")
    parts = re.split("[,/|;]", value) if value[:1] not in ("[", "{") else []

    def choice(part: str) -> str:
        if plain(part) in by_letters:
            return f"{key}={by_letters[plain(part)]}"
        near = [by_letters[n] for n in get_close_matches(plain(part), by_letters, 1, 0.7)]
        others = [f"{key}={name}" for name in (*near, part)]
        return next(map(_words, suggestions(f"{key}={part}")), others[0])

    found = [choice(part) for part in parts if len(parts) > 1]
    groups = {answer.partition("=")[0] for answer in found}
    chosen = dict.fromkeys(answer.partition("=")[2] for answer in found)
    is_one = len(groups) == 1 and " " not in "".join(found)
    return [f"{groups.pop()}={','.join(chosen)}"] if is_one else []


def _elsewhere(typed: str, rest: str) -> list[str]:
    """Return what a word of the field means that is misspelled or longer, or a choice of any group."""
    (key, equals, value), table = typed.lstrip("+").partition("="), _table()
    sections = [table[of].values() for of in ("choices", "verbs", "settings", "groups")]
    known = {bare(n) or plain(n): n for lists in sections for names in lists for n in names}
    is_here = key.startswith("--hardware ") or key in ("sweep", *table["groups"])
    said = "" if is_here else bare(key.rpartition(".")[2]) or bare(key)
    for name in get_close_matches(said, known, n=1, cutoff=0.85):
        found = suggestions(f"{known[name]}{equals}{value}", rest)
        if found := [a for a in found if _words(a).lstrip("+") != typed.lstrip("+")]:
            return found
    says_little = len(value) < 2 or value.lower() in table["fillers"]["values"]
    found = [] if says_little else _chosen("", value)
    return found if len(found) < 3 else []


def bare(text: str) -> str:
    """Return a name without the words that say little in it, such as `use` and `type`."""
    words = re.split(r"[-_/. ]+", text.lower())
    return plain(" ".join(w for w in words if w not in _table()["fillers"]["names"]))


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
    r"(.*[._])?(indifference|within|share|probability|smoothing|target_accuracy)|--(width|tolerance)"
)
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d+):(\d\d):(\d\d)")
_SQUARE = re.compile(r"(\d+)[xX]\1")
_SHARE = re.compile(r"0?\.\d+")
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?) ?([A-Za-z]+|%)")


def plain_number(key: str, text: str) -> str:
    """Return a number with a unit as the number that a setting takes; anything else as it is.

    Args:
        key: of the setting or option; the last part of its name says its unit (`timeout_min`,
            `memory_gib_per_rank`).
        text: as typed, such as `2h`, `5%` or, of pixels, `16x16`.
    """
    if clock := _CLOCK.fullmatch(text):  # [days-]hours:minutes:seconds
        parts = zip(clock.groups(), (86400, 3600, 60, 1), strict=True)
        return plain_number(key, f"{sum(int(part or 0) * size for part, size in parts)}s")
    own = re.sub(r"_per_\w+$", "", key.rpartition(".")[2]).rpartition("_")[2].lstrip("-")
    if own == "px" and (square := _SQUARE.fullmatch(text)):
        return square[1]
    found = _NUMBER.fullmatch(text)
    if not found:
        return text
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return _written(number / 100) if _SHARES.fullmatch(key) else text
    unit = own if unit == "g" and own in ("gb", "gib") else unit  # as Slurm's `--mem=64G`
    for units, of_keys in _KINDS:
        size = units.get(unit) or units.get(unit.removesuffix("s"))
        if own in of_keys and size:
            return _written(number * size / (units.get(own) or units[own.removesuffix("s")]))
    return text


def _written(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def without_units(override: str) -> str:
    """Return an override with values without units, such as `sweep.minutes=120` for `2h`."""
    key, equals, value = override.partition("=")
    if not equals or key.startswith("-") or not value[:1].isdigit():
        return override
    return f"{key}={','.join(plain_number(key.lstrip('+'), part) for part in value.split(','))}"
