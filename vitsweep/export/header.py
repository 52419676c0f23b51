"""What an exported file says of itself: cell, code, speedup, proof, and its difference to the baseline."""

from collections.abc import Iterator, Mapping
from datetime import date
from textwrap import wrap
from typing import Any

from vitsweep.export.prove import Proof
from vitsweep.export.rank import STEPS
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec, flatten

WIDTH = 84
NOT_SETTINGS = ("name", "resources.", "measurement", "data", "tracker")
"""Beginnings of columns that a file does not follow, or says elsewhere."""


def header(
    store: Store,
    row: Mapping[str, Any],
    cell: CellSpec,
    baseline: CellSpec | None,
    proof: Proof | str,
) -> list[str]:
    """Return the lines of the docstring, after what the file does and how it is started.

    Args:
        store: of the sweep.
        row: of the cell in its table.
        cell: what is exported.
        baseline: of the cell; None where it has none.
        proof: what was found, or why nothing was.
    """
    lines = [*wrap(" ".join(_origin(store, row, cell)), WIDTH), ""]
    lines += [*wrap(" ".join(_measured(row)), WIDTH), ""]
    lines += [*(_proved(proof) if isinstance(proof, Proof) else wrap(proof, WIDTH)), ""]
    if baseline is not None and baseline.cell_id != cell.cell_id:
        lines += [f"Against the baseline, cell {baseline.cell_id}:", *_diff(baseline, cell)]
    return [line.replace("\\", "/").replace('"""', "'''") for line in lines]


def _origin(store: Store, row: Mapping[str, Any], cell: CellSpec) -> Iterator[str]:
    code = store.frozen(cell.cell_id).get("code") or {}
    yield f"Written by `vitsweep export` from sweep {store.name}, cell {cell.cell_id}."
    if commit := code.get("git_commit"):
        yield f"Code: commit {str(commit)[:12]}{' with changes' if code.get('git_dirty') else ''}."
    packages = {**(code.get("packages") or {}), **_of_model(cell)}
    torch = _text(row.get("torch"))
    if torch:
        packages["torch"] = torch
    if packages:
        yield f"Versions: {', '.join(f'{n} {v}' for n, v in packages.items() if v)}."


def _of_model(cell: CellSpec) -> dict[str, str]:
    package = getattr(cell.model, "package", None)
    return {package: cell.model.version} if package else {}  # type: ignore[attr-defined]


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    if (rate := _number(row.get("images_per_second"))) is None:
        yield "The cell was not measured."
        return
    device = _text(row.get("device"))
    yield f"Measured: {rate:,.0f} images/s{f' on {device}' if device else ''}."
    speedup, low, high = (
        _number(row.get(name)) for name in ("speedup", "speedup_low", "speedup_high")
    )
    if speedup is not None:
        interval = "no interval" if low is None else f"95 % interval {low:.3f} to {high:.3f}"
        yield f"Speedup over the baseline: {speedup:.3f} ({interval})."


def _proved(proof: Proof) -> Iterator[str]:
    import torch

    verdict = "equal to the cell" if proof.equal else "NOT EQUAL TO THE CELL"
    yield from wrap(
        f"Started alone on {date.today()} with torch {torch.__version__}: {verdict} after {STEPS} "
        "updates, by the largest relative difference of a tensor.",
        WIDTH,
    )
    for leg in proof.legs:
        yield from wrap(f"- {leg}", WIDTH, subsequent_indent="  ")
    if proof.throughput:
        text = f"- throughput without a data loader {proof.throughput}"
        yield from wrap(text, WIDTH, subsequent_indent="  ")


def _diff(baseline: CellSpec, cell: CellSpec) -> Iterator[str]:
    """Yield the settings that differ, those of the baseline first."""
    before, after = flatten(baseline), flatten(cell)
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old == new or key.startswith(NOT_SETTINGS) or _follows(key, before, after):
            continue
        yield from (
            f"{sign} {key}={value}" for sign, value in (("-", old), ("+", new)) if value is not None
        )


def _follows(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a knob differs because its group has another choice."""
    group, dot, _ = key.partition(".")
    return bool(dot) and before.get(group) != after.get(group)


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
