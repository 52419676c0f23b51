"""Writing a sweep folder: every cell with its configuration and code, frozen before anything runs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vitsweep.composition.baseline import baseline_of
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.execution.code_hash import CellCode
from vitsweep.execution.frozen_cell import frozen_document
from vitsweep.planning.provenance import command_line
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, make_sweep_plan
from vitsweep.results.record import Status, utc_now
from vitsweep.results.store import Store
from vitsweep.spec.flatten import flatten
from vitsweep.spec.machine import Machine


def plan_of(composed: Sequence[ComposedCell], machine: Machine, composer: Composer) -> SweepPlan:
    """Type and check the cells and add their baselines.

    Raises:
        BadValueError: a value is wrong, of a cell or of `sweep.baseline`.
    """
    return make_sweep_plan(composed, machine, lambda cell: baseline_of(cell, composer))


def store_of(settings: SweepSettings) -> Store:
    """Return the store of a command, which need not exist yet."""
    return Store(settings.path)


def open_store(settings: SweepSettings) -> Store:
    """Make the sweep folder.

    Raises:
        VitsweepError: it cannot be written.
    """
    return store_of(settings).create()


def freeze(
    store: Store,
    plan: SweepPlan,
    settings: SweepSettings,
    code: dict[str, Any],
    **facts: Any,
) -> None:
    """Write every cell, the invalid ones with their reasons, and append the command.

    Uncommitted changes of the code are written once, and cells name the file.

    Args:
        store: of the sweep.
        plan: its cells.
        settings: of the sweep.
        code: state of the code.
        facts: further entries of the command's line.
    """
    changes = str(code.get("git_diff") or "")
    code = code | {"git_diff": store.keep("code", changes, ".diff") if changes else ""}
    codes: dict[str, CellCode] = {}
    for entry in plan.entries.values():
        document = frozen_document(entry.spec, entry.tree, entry.composed.overrides, code)
        store.freeze(entry.cell_id, document)
        codes[entry.code.hash] = entry.code
        if entry.reasons:
            _record_invalid(store, entry)
    for code_hash, cell_code in codes.items():
        store.keep_code(code_hash, cell_code.files)
    store.append_command(
        {
            "time": utc_now(),
            "command": command_line(),
            "question": settings.question,
            "limit": asdict(settings.limit),
            "search": settings.search,
            "replicate": settings.replicate,
            "cells": [e.cell_id for e in plan.entries.values() if not e.is_added_baseline],
            "baselines": plan.baselines,
            **facts,
        }
    )


def _record_invalid(store: Store, entry: PlannedCell) -> None:
    row = {
        "cell_id": entry.cell_id,
        "sweep": store.name,
        "status": str(Status.invalid),
        "reason": " ".join(entry.reasons),
    }
    store.keep_row(row | flatten(entry.spec))
