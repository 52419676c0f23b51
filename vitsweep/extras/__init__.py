"""Optional features, and the only registry of them: what each adds to the core, as data.

A feature is one folder here. Nothing of it is imported before it is used, and without its folder it is
absent: no verb, no name, no section of a report. The core reads what features add from this module, and
names none of them (`tests/extras/test_law.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.errors import VitsweepError

if TYPE_CHECKING:  # the types of `NAMES`
    from vitsweep.extras.compare.measure import ComparisonResult as ComparisonResult
    from vitsweep.extras.compare.measure import compare as _compare
    from vitsweep.extras.guard.check import check as check
    from vitsweep.extras.guard.check import is_checking as is_checking
    from vitsweep.extras.guard.guard import Guard as Guard
    from vitsweep.extras.judge.measured import measured as measured
    from vitsweep.extras.take_home.apply import Applied as Applied
    from vitsweep.extras.take_home.apply import apply as apply
    from vitsweep.extras.tune.tune import Tuner as Tuner
    from vitsweep.extras.tune.tune import tune as tune

    compare_settings = _compare


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What an optional feature adds.

    Targets are `module:attribute`, the module one of the feature's folder.

    Attributes:
        needs: features without which it is absent, too.
        verbs: of the command line -> what each does, in one line; see `cli.Verb`.
        names: of `import vitsweep` -> their targets.
        methods: of `vitsweep.Sweep` -> functions of its store and what is passed.
        instruments: keys of `measurement` -> modules; in a rank whose cell sets the key `run(trainer, stream,
            prefetched_steps)` returns plain values, and `samples_of(ranks)` what the record keeps of them.
        recorded: a key of the samples of a run, of a line of `commands.jsonl`, or of a row of the table of
            cells, that has something of the feature: a report without it, and without `kept`, loads neither
            section nor chart. With neither key every report does.
        kept: a file of the sweep's folder that has something of the feature.
        section: of a report, a function of the sweep's tables that returns HTML; "" where there is nothing.
        heading: of the section.
        charts: of a report -> the chart after which each is shown, "" for the first; `charts/NAME.py` has
            its `CHART`.
        marks: of the chart of speedups, a function of the tables and a column that returns the cells with
            `published`, the value to mark, and `published_by`, its source.
        below: a function of the tables that returns what a terminal shows below the cells.
        checks: keys of `sweep` -> functions of their value that say why it is refused.
        facts: keys of `sweep` -> functions of the plan and their value: what the line of a command keeps.
        rounds: value of `sweep.search` -> a class that chooses the blocks of a command: a
            `planning.rounds.AddedRounds`.
        result: of such a command, a function of the sweep's tables that returns a
            `report.answer.SearchResult`, or None.
        searches: a key of `sweep` -> a function of the session whose key is set that returns what composes
            other cells from the rows of those before: `first()` are the cells of the first round,
            `measure(session)` runs all rounds, and `finish(session)` shows the result and returns the exit
            code. Without `rounds`, `result` is that of such a search.
        admission: a module that is asked of cells before they run: `admitted` (a plan without those that are
            refused, with the reasons), and `minutes` of their runs.
        columns: of a plan: a function that returns its rows with more columns, and lines to print below.
        options: of a verb or function of the core -> what runs instead of it.
        settings: keys of `sweep` -> the value that asks for nothing; others are refused without the feature,
            and in a grid where it has `rounds`.
    """

    needs: tuple[str, ...] = ()
    verbs: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    instruments: dict[str, str] = field(default_factory=dict)
    recorded: str = ""
    kept: str = ""
    section: str = ""
    heading: str = ""
    charts: dict[str, str] = field(default_factory=dict)
    marks: str = ""
    below: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)
    result: str = ""
    searches: dict[str, str] = field(default_factory=dict)
    admission: str = ""
    columns: str = ""
    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


KNOWN: dict[str, Feature] = {
    "doctor": Feature(
        verbs={"doctor": "say what this machine can do, what is missing, and how to get it"},
    ),
    "predict": Feature(
        admission="admission",
        columns="admission:predicted",
        recorded="predicted_at",
        section="told:section",
        heading="Predictions",
        settings={"only": None, "max_gpu_hours": None},
    ),
    "allocation": Feature(
        verbs={
            "agent": "run the ranks of a node of an allocation, as the command on its first node says"
        },
        options={
            "hydra/launcher=allocation": "launcher:Allocation",
            "cancel": "launcher:refuse_to_cancel",
        },
    ),
    "compare": Feature(
        verbs={
            "compare": "measure two settings in turns until the interval on their ratio is narrow",
        },
        names={"ComparisonResult": "measure:ComparisonResult", "compare": "measure:compare"},
        recorded="comparison",
        section="comparison:section",
        heading="Settings compared in turns",
    ),
    "explain": Feature(
        needs=("compare",),
        verbs={
            "explain": "say why A is faster than B, cause by cause; of A alone, its roofline",
        },
        methods={"explain": "explained:explain_of"},
        instruments={"traced_steps": "step_trace"},
        recorded="trace",
        section="causes:section",
        heading="Why",
        charts={"causes": "waterfall"},
    ),
    "judge": Feature(
        needs=("take_home", "compare"),
        verbs={
            "judge": "measure two states of your code in turns: faster, slower, or wrong",
        },
        names={"measured": "measured:measured"},
    ),
    "gate": Feature(
        verbs={
            "gate": "compare with a kept baseline; exit code 1 if a cell became worse",
        },
        options={
            "vitsweep.compare of two sweeps": "diff:changed",
        },
    ),
    "take_home": Feature(
        verbs={
            "export": "write a cell as one file of plain PyTorch, proved equal to it",
        },
        names={"Applied": "apply:Applied", "apply": "apply:apply"},
    ),
    "guard": Feature(
        needs=("take_home",),
        names={
            "Guard": "guard:Guard",
            "check": "check:check",
            "is_checking": "check:is_checking",
        },
    ),
    "tune": Feature(
        needs=("take_home", "compare", "race", "guard"),
        names={"Tuner": "tune:Tuner", "tune": "tune:tune"},
    ),
    "bundle": Feature(
        needs=("compare",),
        verbs={
            "bundle": "write a sweep as one archive that another laboratory can check",
            "reproduce": "check a bundle, and measure its claims on this machine",
        },
        options={"sweep.reference=BUNDLE": "archive:extract"},
    ),
    "pareto": Feature(
        charts={"pareto": "memory"},
    ),
    "curves": Feature(
        recorded="training",
        charts={"accuracy": "pareto", "training_curves": "accuracy"},
    ),
    "mirror": Feature(
        options={"tracker=wandb": "tracker:tracker"},
    ),
    "latex": Feature(
        options={"report --latex": "latex:write_latex"},
    ),
    "published": Feature(
        recorded="published",
        section="shown:section",
        heading="Published and measured",
        marks="shown:marked",
        below="shown:below",
        checks={"published": "figures:problems"},
        facts={"published": "figures:kept"},
    ),
    "reference": Feature(
        recorded="reference",
        section="shown:section",
        heading="Beside records of the same kind of GPU",
        below="shown:ReferenceTable",
        checks={"reference": "records:problems"},
        facts={"reference": "records:kept"},
        options={"doctor": "shown:ReferenceTable"},
        settings={"reference": None},
    ),
    "limit": Feature(
        recorded="limit",
        section="shown:section",
        heading="Limits",
        searches={"limit.key": "search:Searches.of"},
        result="shown:result",
        settings={"limit.key": None},
    ),
    "race": Feature(
        methods={"race": "table:race_of"},
        kept="race.json",
        section="result:section",
        heading="Race",
        rounds={"race": "rounds:RaceRounds"},
        result="result:result",
        settings={"rank_by": "throughput", "memory_limit_gib": None, "confirm": 5},
    ),
}
"""Every feature by the name of its folder, in the order in which it is shown."""


def is_here(name: str) -> bool:
    """Tell whether the folder of a feature is there, and those of the features that it needs."""
    folder = Path(__file__).parent / name
    return (folder / "__init__.py").is_file() and all(map(is_here, KNOWN[name].needs))


FEATURES = {name: feature for name, feature in KNOWN.items() if is_here(name)}
"""Those whose folders are there."""

VERBS = {
    verb: (said, f"{__name__}.{n}.verb_{verb}")
    for n, f in FEATURES.items()
    for verb, said in f.verbs.items()
}
"""Verb -> what it does, and its module."""

NAMES = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.names.items()}
"""What `import vitsweep` offers -> its target, the feature first: `judge.measured:measured`."""

METHODS = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.methods.items()}
"""What a `vitsweep.Sweep` can -> its target."""

INSTRUMENTS = {key: f"{n}.{at}" for n, f in FEATURES.items() for key, at in f.instruments.items()}
"""Key of `measurement` -> the module that is run where it is set, the feature first."""

ROUNDS = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.rounds.items()}
"""Value of `sweep.search` -> what chooses the blocks, the feature first."""

SEARCHES = {key: f"{n}.{at}" for n, f in FEATURES.items() for key, at in f.searches.items()}
"""Key of `sweep` -> the target of what composes the cells of each round, the feature first."""

RESULTS = {
    word: f"{n}.{f.result}" for n, f in FEATURES.items() for word in (*f.rounds, *f.searches)
}
"""Value of `sweep.search`, or the key of a search -> the target of what says its result."""

SEARCHED = {
    (key, word): unused
    for f in FEATURES.values()
    for word in f.rounds
    for key, unused in f.settings.items()
}
"""Key of `sweep` and the value of `sweep.search` that it is for -> the value that asks for nothing."""

CHECKS = {key: f"{n}.{at}" for n, f in FEATURES.items() for key, at in f.checks.items()}
"""Key of `sweep` -> the target of what says why its value is refused."""

FACTS = {key: f"{n}.{at}" for n, f in FEATURES.items() for key, at in f.facts.items()}
"""Key of `sweep` -> the target of what the line of a command keeps of it."""

ADMISSION = tuple(f"{n}.{f.admission}" for n, f in FEATURES.items() if f.admission)
"""Modules that are asked of cells before they run."""

COLUMNS = tuple(f"{n}.{f.columns}" for n, f in FEATURES.items() if f.columns)
"""Targets of what adds columns to a plan."""

OPTIONS = {
    option: f"{n}.{place}" for n, f in FEATURES.items() for option, place in f.options.items()
}
"""Verb and option -> the target of what runs."""

ABSENT = {k: v for n, f in KNOWN.items() if n not in FEATURES for k, v in f.settings.items()}
"""Keys of `sweep` whose features are not there -> the value that asks for nothing."""


def option(name: str) -> Any:
    """Return what runs for a verb and an option.

    Raises:
        VitsweepError: the folder of the feature was removed.
    """
    if name not in OPTIONS:
        raise VitsweepError(f"`{name}` needs an optional feature that is not installed.")
    return load(OPTIONS[name])


def tracker(settings: Mapping[str, Any] | None) -> Any:
    """Return what mirrors the cells of a store, as the node `tracker` says; None for nothing.

    Raises:
        VitsweepError: the settings cannot work here, or the folder of the feature was removed.
    """
    is_on = (settings or {}).get("mode", "none") != "none"
    return option("tracker=wandb")(settings) if is_on else None


def facts(plan: Any, settings: Any) -> dict[str, Any]:
    """Return what the line of a command keeps of its settings of `sweep`, by their keys."""
    told = {key: value for key in FACTS if (value := getattr(settings, key))}
    return {key: load(FACTS[key])(plan, value) for key, value in told.items()}


def load(place: str) -> Any:
    """Import what a feature adds: `feature.module:attribute`."""
    module, _, attribute = place.partition(":")
    return attrgetter(attribute)(import_module(f"{__name__}.{module}"))


def each(names: Iterable[str], hook: str) -> Iterator[Any]:
    """Yield what the named features have at a hook, imported."""
    for name in names:
        if place := getattr(FEATURES[name], hook):
            yield load(f"{name}.{place}")
