"""LocalSettings: the fields of conf/hydra/launcher/local.yaml, typed and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt

from vitsweep.composition.suggestions import did_you_mean
from vitsweep.errors import BadValueError
from vitsweep.results.metrics import METRICS
from vitsweep.spec.from_yaml import section_from_tree


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Settings of the launcher of this machine.

    Attributes:
        parallel: cells that run at the same time.
        objective: column of a cell's row that an optimizing sweeper is given.
    """

    parallel: Annotated[int, Gt(0)]
    objective: str


def local_settings(fields: Mapping[str, Any]) -> LocalSettings:
    """Type the launcher's fields.

    Raises:
        BadValueError: a field is unknown, missing or has a wrong value; all such are named.
    """
    settings: LocalSettings = section_from_tree(LocalSettings, fields, "hydra.launcher")
    check_objective(settings.objective)
    return settings


def check_objective(objective: str) -> None:
    """Refuse an objective that is no column of a cell, before a sweep is measured for it.

    Raises:
        BadValueError: it is none of the metrics.
    """
    if objective not in METRICS:
        raise BadValueError(
            f"`hydra.launcher.objective={objective}` is no measured column, such as "
            "`images_per_second`, `speedup` or `peak_gib`."
            + did_you_mean(objective, METRICS, lambda name: f"hydra.launcher.objective={name}")
        )
