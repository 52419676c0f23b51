"""The figures of `gpu.py` as Markdown tables."""

import json
from pathlib import Path
from typing import Any

from gpu_list import PARTS

GROUPS = ("causal kernel", "steps", "cells")
"""Keys under which a part keeps name -> result."""
NOT_SHOWN = ("turns_ms",)


def report(out: Path) -> str:
    """Return what the parts wrote so far."""
    facts = json.loads((out / "environment.json").read_text())
    lines = ["# One GPU", "", *(f"- {name}: {_text(value)}" for name, value in facts.items()), ""]
    for part in PARTS:
        path = out / f"{part.name}.json"
        lines += [f"## {part.question}", ""]
        lines += _table(json.loads(path.read_text())) if path.exists() else ["No figures.", ""]
    return "\n".join(lines)


def _table(figures: dict[str, Any]) -> list[str]:
    rows = figures.get("rows") or [
        {"name": name} | (value if isinstance(value, dict) else {"result": value})
        for group in GROUPS
        for name, value in figures.get(group, {}).items()
    ]
    columns = list(dict.fromkeys(c for row in rows for c in row if c not in NOT_SHOWN))
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    facts = figures.get("rates", {}) | figures.get("summary", {})
    listed = [f"- {name}: {_text(value)}" for name, value in facts.items()]
    return [*head, *("| " + " | ".join(row) + " |" for row in cells), "", *listed, ""]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:200]
