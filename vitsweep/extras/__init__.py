"""Optional features, and the only registry of them: what each adds to the core, as data.

A feature is one folder here. Nothing of it is imported before it is used, and without its folder it is
absent: no verb, no name, no section of a report. The core reads what features add from this module, and
names none of them (`tests/extras/test_law.py`).
"""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitsweep.errors import VitsweepError

if TYPE_CHECKING:  # the types of `NAMES`
    from vitsweep.extras.judge.measured import measured as measured
    from vitsweep.extras.take_home.apply import Applied as Applied
    from vitsweep.extras.take_home.apply import apply as apply


class AddedVerb(NamedTuple):
    """A verb of the command line; `verb_NAME.py` has its `add_options` and `run`, see `cli.verbs.Verb`."""

    name: str
    usage: str
    summary: str
    names_a_sweep: bool = True


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What an optional feature adds.

    Places are `module:attribute`, the module one of the feature's folder.

    Attributes:
        words: identifiers that no core file may define; one that ends in `_` stands for all that begin so.
        needs: features without which it is absent, too.
        pages: of `docs/`.
        verbs: of the command line.
        names: of `import vitsweep` -> their places.
        methods: of `vitsweep.Sweep` -> functions of its store and what is passed.
        instruments: keys of `measurement` -> modules; in a rank whose cell sets the key `run(trainer, stream,
            prefetched_steps)` returns plain values, and `samples_of(ranks)` what the record keeps of them.
        recorded: a key of the samples of a run that has something of the feature: a report without such a
            run, and without `kept`, loads neither section nor chart. With neither key every report does.
        kept: a file of the sweep's folder that has something of the feature.
        section: of a report, a function of the sweep's tables that returns HTML; "" where there is nothing.
        heading: of the section.
        charts: of a report -> the chart after which each is shown, "" for the first; `charts/NAME.py` has
            its `CHART`.
        rounds: value of `sweep.search` -> a class that chooses the blocks of a command: a
            `planning.rounds.AddedRounds`.
        result: of such a command, a function of the sweep's tables that returns a
            `report.answer.SearchResult`, or None.
        admission: a module that is asked of cells before they run: `admitted` (a plan without those that are
            refused, with the reasons), and `minutes` of their runs.
        columns: of a plan: a function that returns its rows with more columns, and lines to print below.
        options: of a verb or function of the core -> what runs instead of it.
        settings: keys of `sweep` -> the value that asks for nothing; others are refused without the feature,
            and in a grid where it has `rounds`.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    verbs: tuple[AddedVerb, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    instruments: dict[str, str] = field(default_factory=dict)
    recorded: str = ""
    kept: str = ""
    section: str = ""
    heading: str = ""
    charts: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)
    result: str = ""
    admission: str = ""
    columns: str = ""
    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


KNOWN: dict[str, Feature] = {
    "predict": Feature(
        words=(
            "keep_predictions",
            "predict_",
            "predicts",
            "StepTrace",
            "time_operators",
        ),
        pages=("before_you_submit.md",),
        admission="admission",
        columns="columns:predicted",
        settings={"only": None, "max_gpu_hours": None},
    ),
    "explain": Feature(
        words=(
            "ExplainRequest",
            "RankTrace",
            "TracedRun",
            "explain",
            "explanations",
            "traced_pairs",
        ),
        pages=("explain.md",),
        verbs=(
            AddedVerb(
                "explain",
                "A [B [override ...]] [--sweep SWEEP] [--blocks 5] [--steps 3] [--minutes 30] "
                "[--operators N] [--config-dir FOLDER] [--json]",
                "say why A is faster than B, cause by cause; of A alone, its roofline",
                names_a_sweep=False,
            ),
        ),
        methods={"explain": "explained:explain_of"},
        instruments={"traced_steps": "instrument"},
        recorded="trace",
        section="causes:section",
        heading="Why",
        charts={"causes": "waterfall"},
    ),
    "judge": Feature(
        words=("judge_request", "JudgeRequest"),
        needs=("take_home",),
        pages=("judge.md",),
        verbs=(
            AddedVerb(
                "judge",
                "BASE [HEAD] [override ...] [--step FILE:FUNCTION|--script FILE] "
                "[--examples FILE:FUNCTION] [--quality NAME] [--minutes 5] [--width 0.03] "
                "[--setup CMD] [--link PATH] [--path FOLDER] [--python-base PYTHON] "
                "[--python-head PYTHON] [--config-dir FOLDER] [--markdown FILE] [--json]",
                "measure two states of your code in turns: faster, slower, or wrong",
                names_a_sweep=False,
            ),
        ),
        names={"measured": "measured:measured"},
    ),
    "gate": Feature(
        words=("changes_in_words", "sweep_diff"),
        verbs=(
            AddedVerb(
                "gate",
                "[SWEEP] --against KEPT [--tolerance 0.05] [--metric A,B] [--lenient] [--mixed-hardware] "
                "[--json]",
                "compare with a kept baseline; exit code 1 if a cell became worse",
            ),
        ),
        options={
            "report SWEEP OTHER": "two_sweeps:write_page",
            "vitsweep.compare of two sweeps": "two_sweeps:changed",
        },
    ),
    "take_home": Feature(
        words=("asked_cell", "not_provable"),
        pages=("apply.md", "export.md"),
        verbs=(
            AddedVerb(
                "export",
                "[SWEEP] --cell best|ID|SETTING ... --to FILE [--no-prove] [--minutes 5]",
                "write a cell as one file of plain PyTorch, proved equal to it",
            ),
        ),
        names={"Applied": "apply:Applied", "apply": "apply:apply"},
    ),
    "bundle": Feature(
        words=("bundle", "bundled", "reproduction"),
        pages=("bundle.md",),
        verbs=(
            AddedVerb(
                "bundle",
                "[SWEEP] [--to FILE] [--margin 0.1]",
                "write a sweep as one archive that another laboratory can check",
            ),
            AddedVerb(
                "reproduce",
                "BUNDLE [--check] [--minutes 60]",
                "check a bundle, and measure its claims on this machine",
                names_a_sweep=False,
            ),
        ),
    ),
    "latex": Feature(
        words=("booktabs", "tex", "write_latex"),
        options={"report --latex": "latex:write_latex"},
    ),
    "race": Feature(
        words=(
            "RACE",
            "RaceRounds",
            "can_race",
            "halving",
            "is_race",
            "race_",
            "racing",
            "read_race",
            "require_racing",
            "show_race",
            "within_reach",
        ),
        pages=("race.md",),
        methods={"race": "table:race_of"},
        kept="race.json",
        section="result:section",
        heading="Race",
        charts={"race": ""},
        rounds={"race": "rounds:RaceRounds"},
        result="result:result",
        settings={"objective": "throughput", "memory_limit_gib": None, "confirm": 5},
    ),
}
"""Every feature by the name of its folder, in the order in which it is shown."""


def is_here(name: str) -> bool:
    """Tell whether the folder of a feature is there, and those of the features that it needs."""
    folder = Path(__file__).parent / name
    return (folder / "__init__.py").is_file() and all(map(is_here, KNOWN[name].needs))


FEATURES = {name: feature for name, feature in KNOWN.items() if is_here(name)}
"""Those whose folders are there."""

VERBS = {f"{__name__}.{n}.verb_{v.name}": v for n, f in FEATURES.items() for v in f.verbs}
"""Module -> the verb that it runs."""

NAMES = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.names.items()}
"""What `import vitsweep` offers -> its place, the feature first: `judge.measured:measured`."""

METHODS = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.methods.items()}
"""What a `vitsweep.Sweep` can -> its place."""

INSTRUMENTS = {key: f"{n}.{at}" for n, f in FEATURES.items() for key, at in f.instruments.items()}
"""Key of `measurement` -> the module that is run where it is set, the feature first."""

ROUNDS = {word: f"{n}.{place}" for n, f in FEATURES.items() for word, place in f.rounds.items()}
"""Value of `sweep.search` -> what chooses the blocks, the feature first."""

RESULTS = {word: f"{n}.{f.result}" for n, f in FEATURES.items() for word in f.rounds}
"""Value of `sweep.search` -> the place of what says its result."""

SEARCHED = {
    (key, word): unused
    for f in FEATURES.values()
    for word in f.rounds
    for key, unused in f.settings.items()
}
"""Key of `sweep` and the value of `sweep.search` that it is for -> the value that asks for nothing."""

ADMISSION = tuple(f"{n}.{f.admission}" for n, f in FEATURES.items() if f.admission)
"""Modules that are asked of cells before they run."""

COLUMNS = tuple(f"{n}.{f.columns}" for n, f in FEATURES.items() if f.columns)
"""Places of what adds columns to a plan."""

OPTIONS = {
    option: f"{n}.{place}" for n, f in FEATURES.items() for option, place in f.options.items()
}
"""Verb and option -> the place of what runs."""

ABSENT = {k: v for n, f in KNOWN.items() if n not in FEATURES for k, v in f.settings.items()}
"""Keys of `sweep` whose features are not there -> the value that asks for nothing."""


def option(name: str) -> Any:
    """Return what runs for a verb and an option.

    Raises:
        VitsweepError: the folder of the feature was removed.
    """
    if name not in OPTIONS:
        raise VitsweepError(f"`{name}` is of an optional feature that is not installed here.")
    return load(OPTIONS[name])


def load(place: str) -> Any:
    """Import what a feature adds: `feature.module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
