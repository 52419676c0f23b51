"""Columns of the user's: a function of a run's record and samples, named in a YAML of the group `metric`.

It is called where a run has been measured. Its definition is kept with the command, so that every
table, chart and report that reads the sweep knows unit and label.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from vitsweep.errors import BadValueError
from vitsweep.results.metrics import METRICS, RESERVED, RESERVED_PATTERN, Metric
from vitsweep.results.provenance import is_own
from vitsweep.results.record import RunRecord
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.spec.from_yaml import imported_function, is_function_path
from vitsweep.spec.generators import seeded_generators

Definitions = Mapping[str, Mapping[str, Any]]
"""Column -> `function`, `unit`, `label`, `better`."""

KEYS = {"function", "unit", "label", "better"}
_COLUMN = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class UserMetric:
    """One column: its definition, and the path of the function that computes it."""

    metric: Metric
    function: str

    def compute(self, record: RunRecord) -> float:
        """Call the function with a copy of the record and its samples, which it may change.

        Raises:
            NoNumberError: it returned something else than a finite number.
            BaseException: whatever importing or calling it raises, `SystemExit` among them.
        """
        own = deepcopy(record)
        function = imported_function(self.function)
        with seeded_generators(record.spec.get("seed", 0), f"metric {self.metric.column}"):
            value = function(own, own.samples)
        try:
            number = float("nan" if isinstance(value, (str, bytes)) else value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not isfinite(number):
            raise NoNumberError(f"returned {value!r:.80}, which is no finite number")
        return number


class NoNumberError(Exception):
    """A function of a user's returned something that is no value of a metric."""


def user_metrics(definitions: Definitions) -> list[UserMetric]:
    """Check definitions, as they stand below `metric.columns`.

    Raises:
        BadValueError: this is no section, a key is missing or unknown, a column has the name of one of
            vitsweep's, or two have the same label and unit.
    """
    if definitions is None:
        return []
    if not isinstance(definitions, Mapping):
        raise BadValueError(
            f"`metric.columns={definitions}` must be a section of columns, such as "
            "`++metric.columns.energy_j={function:my_package.metrics.energy}`."
        )
    found = [_checked(column, node) for column, node in definitions.items()]
    by_heading: dict[str, str] = {}
    for own in found:
        heading, column = own.metric.axis_label, own.metric.column
        if (other := by_heading.setdefault(heading, column)) != column:
            raise BadValueError(
                f"`metric.columns.{column}` and `metric.columns.{other}` have the same label and unit, "
                f"`{heading}`: tables need two."
            )
    return found


def _checked(column: str, node: Any) -> UserMetric:
    path = f"metric.columns.{column}"
    if not isinstance(node, Mapping) or set(node) != KEYS:
        raise BadValueError(
            f"`{path}` must have the keys `function`, `unit`, `label` and `better`, and no other."
        )
    if not _COLUMN.fullmatch(column) or column in METRICS:
        fault = "is a column of vitsweep's" if column in METRICS else "is no name of a column"
        raise BadValueError(f"`{path}`: `{column}` {fault}: use another one, in small letters.")
    if node["better"] not in ("higher", "lower", None):
        raise BadValueError(f"`{path}.better={node['better']}` must be `higher`, `lower` or null.")
    if not is_function_path(str(node["function"])):
        raise BadValueError(
            f"`{path}.function={node['function']}` must name a function, like `package.module.function`."
        )
    definition = f"{node['function']}(record, samples), when a run has been measured"
    metric = Metric(column, str(node["unit"]), str(node["label"]), node["better"], definition)
    return UserMetric(metric, str(node["function"]))


def check_metrics(definitions: Definitions) -> None:
    """Refuse columns that exist already and functions that cannot be imported, before anything runs.

    Raises:
        BadValueError: a definition is wrong, its column is one of a record or table, or its function
            cannot be imported or called.
    """
    for metric in user_metrics(definitions):
        column = metric.metric.column
        typed = f"metric.columns.{column}.function={metric.function}"
        if column in RESERVED or RESERVED_PATTERN.fullmatch(column):
            raise BadValueError(
                f"`metric.columns.{column}`: tables have a column `{column}` already, or keep the name "
                "for one: use another one."
            )
        try:
            function = imported_function(metric.function)
        except Exception as error:  # the module is the user's
            raise BadValueError(
                f"`{typed}` cannot be imported ({type(error).__name__}: {error})."
            ) from error
        if not callable(function):
            raise BadValueError(
                f"`{typed}` is a {type(function).__name__}, which cannot be called: name a function of "
                "(record, samples) that returns a number."
            )


def with_user_metrics(record: RunRecord, definitions: Definitions) -> RunRecord:
    """Return the record of a measured run with the user's columns.

    Where a function raises or returns no finite number, its column is empty and `<column>_reason` says why.
    A function that ends the process (`sys.exit()`) is one that raises: the run has been measured.

    Raises:
        KeyboardInterrupt: the user stopped it.
    """
    metrics, reasons = dict(record.metrics), {}
    for metric in user_metrics(definitions):
        column = metric.metric.column
        metrics[column] = None
        try:
            metrics[column] = metric.compute(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the code is the user's
            is_ours = isinstance(error, NoNumberError)
            told = error if is_ours else f"raised {type(error).__name__}: {error}"
            reasons[f"{column}_reason"] = f"{metric.function} {told}"
    return replace(record, metrics=metrics, environment=record.environment | reasons)


def definitions_of(commands: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the definitions of some commands of a sweep; of one column the latest counts."""
    sections = [found for c in commands if isinstance(found := c.get("metrics"), Mapping)]
    return {
        column: node
        for section in sections
        for column, node in section.items()
        if isinstance(node, Mapping)
    }


def own_definitions(store: Store) -> dict[str, Mapping[str, Any]]:
    """Return the definitions that this user has typed for a sweep, or accepted in it."""
    return definitions_of(command for command in store.commands() if is_own(command))


def foreign_functions(store: Store, own: Definitions) -> Iterator[str]:
    """Yield `key=value` of the functions of columns that somebody else names, and this user does not."""
    for column, node in definitions_of(store.commands()).items():
        if node != own.get(column):
            yield f"metric.columns.{column}.function={node.get('function')}"


def attributes_of(store: Store) -> dict[str, Any]:
    """Return the attributes of tables of a sweep: the definitions that `metrics.own_metrics` reads."""
    known: dict[str, Mapping[str, Any]] = {}
    for column, node in definitions_of(store.commands()).items():
        try:
            user_metrics(known | {column: node})
        except BadValueError as error:  # of a command of somebody else's, or of an earlier version
            text = f"{store.root / 'commands.jsonl'}: a column is left out: {error}"
            warnings.warn(text, DamagedRecordWarning, stacklevel=2)
        else:
            known[column] = node
    found = [metric.metric for metric in user_metrics(known)]
    own = {m.column: [m.unit, m.label, m.better, m.definition] for m in found}
    return {"metrics": own} if own else {}
