"""SweepSettings: the node `sweep` of the configuration, typed and checked.

It stands in composition, which needs `axes`, `cells` and `zip` to expand a grid and `baseline` and
`match` to compose baselines; planning and the launchers read the rest.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from vitsweep import extras
from vitsweep.errors import BadValueError
from vitsweep.results.record import RETRIABLE
from vitsweep.spec.from_yaml import section_from_tree

_NOT_IN_A_NAME = "/\\[]%"
_LONGEST_NAME_BYTES = 200


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What `sweep.limit` says: which key's largest working value is searched for, and how.

    Attributes:
        key: whole number of the configuration whose largest value is searched for; None for a
            plain grid.
        first: value to try first; doubled until one does not fit, halved until one fits.
        step: only multiples of it are tried, as `model.patch_px` asks of a resolution.
        most: no larger value is tried; None for no bound.
        within: the search ends when the smallest value that fails is at most this fraction above
            the largest that fits.
    """

    key: str | None
    first: Annotated[int, Gt(0)]
    step: Annotated[int, Gt(0)]
    most: Annotated[int, Gt(0)] | None
    within: Annotated[float, Gt(0)]

    def round_down(self, value: float) -> int:
        """Return the largest value that may be tried and is not above `value`."""
        return int(value // self.step) * self.step


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The node `sweep` of conf/config.yaml, where each field is explained."""

    name: str
    folder: str
    question: str
    baseline: str | tuple[Any, ...] | dict[str, Any] | None
    match: tuple[str, ...]
    zip: tuple[list[str], ...]
    axes: dict[str, Any]
    cells: tuple[str | list[Any], ...]
    published: tuple[dict[str, Any], ...]
    reference: str | None
    by_machine: dict[str, dict[str, Any]]
    limit: LimitSettings
    only: Literal["fits"] | None
    max_gpu_hours: Annotated[float, Gt(0)] | None
    try_anyway: bool
    search: Literal["grid", "race"]
    rank_by: Literal["throughput", "throughput_per_cost"]
    memory_limit_gib: Annotated[float, Gt(0)] | None
    keep_model: bool
    indifference: Annotated[float, Gt(0), Lt(1)]
    minutes: Annotated[float, Gt(0)] | None
    confirm: Annotated[int, Ge(0)]
    replicate: Literal["seed"] | None
    cells_per_block: Annotated[int, Gt(0)]
    screening: Literal["auto"] | bool
    prune_slowdown: Annotated[float, Gt(1)] | None
    retry: tuple[str, ...]
    remeasure: bool
    accept_code: Literal["same", "any"]
    snapshot_code: bool
    report: bool

    @property
    def path(self) -> Path:
        """Folder of the sweep."""
        return Path(self.folder) / self.name


def sweep_settings(config: Mapping[str, Any]) -> SweepSettings:
    """Type and check the node `sweep` of a composed configuration.

    Raises:
        BadValueError: a key is unknown, missing or has a value that is not allowed; all such are
            named.
    """
    return _checked(json.dumps(config["sweep"]))


@lru_cache(maxsize=16)
def _checked(node: str) -> SweepSettings:
    """Check a node, given as JSON, once for all cells of a command."""
    tree = json.loads(node)
    if isinstance(names := tree.get("zip"), list) and names and isinstance(names[0], str):
        tree["zip"] = [names]  # one group of keys
    settings: SweepSettings = section_from_tree(SweepSettings, tree, "sweep")
    if problems := [*_problems(settings)]:
        raise BadValueError("\n".join(problems))
    return settings


def _problems(settings: SweepSettings) -> Iterator[str]:
    """Say what a sweep cannot be called, does not go with what chooses the rounds, and is not installed."""
    # a folder, a job name and a label
    name, encoding = settings.name, sys.getfilesystemencoding()
    if not (
        name.strip() == name
        and name not in ("", ".", "..")
        and not name.startswith(("-", "~"))
        and name.isprintable()
        and not set(name) & {*_NOT_IN_A_NAME}
        and len(name.encode()) <= _LONGEST_NAME_BYTES
        and name.encode(encoding, "replace").decode(encoding) == name
    ):
        yield (
            f"`sweep.name={_escaped(name)}` must name a folder: use at most {_LONGEST_NAME_BYTES} letters, "
            "digits, `.`, `_` and `-`, such as `first_try`; `sweep.folder` says where the folder lies."
        )
    folder, search = settings.folder, settings.search
    if not (folder.strip() and folder.isprintable()):
        yield f"`sweep.folder={_escaped(folder)}` is no path of a folder: leave it out for `results`."
    if not {*settings.retry} <= {*RETRIABLE}:
        again = ", ".join(f"`{status}`" for status in RETRIABLE)
        typed = f"`sweep.retry=[{','.join(settings.retry)}]`"
        yield f"{typed}: cells can run again whose status is {again}."
    if search in extras.ROUNDS:
        yield from extras.load(extras.ROUNDS[search]).problems(settings)
    elif search != "grid":
        yield f"`sweep.search={search}` is an optional feature that is not installed here."
    elif settings.minutes is not None and settings.baseline is None:
        yield (
            f"`sweep.minutes={settings.minutes:g}` ends where it is known how each cell compares with its "
            "baseline, and this sweep has none (`sweep.baseline=null`): type `measurement.blocks=3` instead."
        )
    else:
        for (key, other), unused in extras.SEARCHED.items():
            if (value := getattr(settings, key)) != unused:
                yield (
                    f"`sweep.{key}={value}` is for a {other}, and a grid measures every cell: add "
                    f"`sweep.search={other}`, or leave it out."
                )
    for key, unused in extras.ABSENT.items():
        if attrgetter(key)(settings) != unused:
            yield f"`sweep.{key}` is of an optional feature that is not installed here: leave it out."
    for key, place in extras.CHECKS.items():
        if value := getattr(settings, key):
            yield from extras.load(place)(value)


def _escaped(text: str) -> str:
    return text if text.isprintable() else repr(text)
