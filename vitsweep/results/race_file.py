"""`race.json` of a sweep folder: how far a race came, for tables and charts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitsweep.files import write_atomically

NAME = "race.json"


def read_race(folder: Path) -> dict[str, Any]:
    """Return what a race wrote into a sweep folder; {} where there was none, or the file is damaged."""
    try:
        document = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_race(folder: Path, document: Mapping[str, Any]) -> None:
    """Replace what a race wrote."""
    write_atomically(folder / NAME, json.dumps(document, separators=(",", ":")))
