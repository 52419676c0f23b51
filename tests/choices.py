"""One choice of a config group, read from its YAML as it stands."""

from pathlib import Path
from typing import Any

import yaml

from vitsweep.spec.from_yaml import part_from_tree

CONF = Path(__file__).parents[1] / "conf"


def choice(group: str, name: str, **overrides: Any) -> Any:
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    return part_from_tree({group: node | {"name": name} | overrides}, group)
