"""Optional features, and the only registry of them: what each adds to the core, as data.

A feature is one folder here. Nothing of it is imported before it is used, and without its folder it is
absent: no verb, no name, no section of a report. The core reads what features add from this module, and
names none of them (`tests/extras/test_law.py`).
"""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the types of `NAMES`
    from vitsweep.extras.judge.measured import measured as measured


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
        page: of `docs/`.
        verbs: of the command line.
        names: of `import vitsweep` -> their places.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    page: str = ""
    verbs: tuple[AddedVerb, ...] = ()
    names: dict[str, str] = field(default_factory=dict)


KNOWN: dict[str, Feature] = {
    "judge": Feature(
        words=("judge_request", "JudgeRequest", "judging"),
        page="judge.md",
        verbs=(
            AddedVerb(
                "judge",
                "BASE [HEAD] [override ...] [--step FILE:FUNCTION|--script FILE] "
                "[--examples FILE:FUNCTION] [--quality NAME] [--minutes 5] [--width 0.03] "
                "[--setup CMD] [--link PATH] [--path FOLDER] [--python-base PYTHON] "
                "[--python-head PYTHON] [--config-dir FOLDER] [--series FOLDER] [--markdown FILE] [--json]",
                "measure two states of your code in turns: faster, slower, or wrong",
                names_a_sweep=False,
            ),
        ),
        names={"measured": "measured:measured"},
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


def load(place: str) -> Any:
    """Import what a feature adds: `feature.module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
