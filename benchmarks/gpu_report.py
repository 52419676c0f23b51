"""The figures of `gpu.py` as Markdown tables."""

from collections.abc import Sequence
from typing import Any

from gpu_list import Part

GROUPS = ("causal kernel", "steps", "cells")
"""Keys under which a part keeps name -> result."""
NOT_SHOWN = ("turns_ms",)


def report(facts: dict[str, Any], found: dict[str, Any], parts: Sequence[Part]) -> str:
    """Return what the parts wrote so far: `found` maps a part's name to its figures."""
    lines = ["# One GPU", "", *(f"- {name}: {_text(value)}" for name, value in facts.items()), ""]
    for part in parts:
        lines += [f"## {part.question}", ""]
        lines += _table(found[part.name]) if part.name in found else ["No figures.", ""]
    return "\n".join(lines)


def _table(figures: dict[str, Any]) -> list[str]:
    rows = figures.get("rows") or [
        {"name": name} | (value if isinstance(value, dict) else {"result": value})
        for group in GROUPS
        for name, value in figures.get(group, {}).items()
    ]
    if not rows:
        return [*(f"- {name}: {_text(value)}" for name, value in figures.items()), ""]
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
