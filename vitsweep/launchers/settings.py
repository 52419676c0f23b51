"""What can be set of the launcher of this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt

from vitsweep.spec.from_yaml import section_from_tree


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Settings of the launcher of this machine.

    Attributes:
        parallel: cells that run at the same time.
    """

    parallel: Annotated[int, Gt(0)]


def local_settings(fields: Mapping[str, Any]) -> LocalSettings:
    """Type the launcher's fields.

    Raises:
        BadValueError: a field is unknown, missing or has a wrong value; all such are named.
    """
    settings: LocalSettings = section_from_tree(LocalSettings, fields, "hydra.launcher")
    return settings
