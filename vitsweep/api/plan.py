"""`vitsweep plan`: what a sweep would run and could show, without training anything."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep import extras
from vitsweep.api.session import Session
from vitsweep.console import open_console, print_lines
from vitsweep.planning.blocks import (
    describe_detectable_effect,
    describe_least_blocks,
    noise_of,
    num_screenings,
    runs_per_cell,
)
from vitsweep.planning.freeze import code_state
from vitsweep.planning.pending import ResumeState, print_notices, resume_state
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels, cell_settings, cell_table
from vitsweep.rates.profile import Profile, profile_named
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.resources import HERE, Machine
from vitsweep.tables.formatting import (
    Column,
    count,
    number,
    plain,
    text_columns,
    values,
    with_interval,
)
from vitsweep.tables.notes import reason_lines
from vitsweep.tables.render import TextTable, baseline_line, common_settings, technique_notes

CORES_PER_GPU = 12
"""Of a node that is not here."""


def machine_with(profile: Profile) -> Machine:
    """Return a node of the profile's devices, with as many as it says."""
    devices = int(profile["devices_per_node"])
    return Machine(
        device="cuda",
        cores_per_node=CORES_PER_GPU * devices,
        devices_per_node=devices,
        described_by=profile.title,
        gib_per_device=profile.usable_bytes / 2**30,
        least_gib=profile.usable_bytes / 2**30,
        has_tf32=profile.has_tf32,
    )


MOST_SECONDS_OF_NOTES = 10.0
"""For which a plan looks at the files of image folders, which may be millions on a slow file system."""


# The table of a plan in a terminal, and what stands below it.


MB = 1e6
NOT_VALUES = ("settings", "reasons", "overrides")


def _sent_megabytes(rows: DataFrame) -> list[str]:
    names = [f"{what}_bytes_per_step" for what in ("parameter", "gradient", "activation")]
    sent = rows.reindex(columns=names).sum(axis=1, skipna=False) / MB
    return [_two_digits(value) for value in sent]


def _two_digits(value: Any) -> str:
    return number(value, 2)


_SHORT: dict[str, Column] = {
    "cell": values("cell"),
    "state": values("state"),
    "runs": values("runs", lambda runs: plain(runs or "")),
    "peak GiB": values("peak_gib", _two_digits),
    "sent MB": _sent_megabytes,
    "step ms": with_interval("step_time_ms", _two_digits, _two_digits, "step_time_{}_ms"),
    "img/s": values("images_per_second", _two_digits),
}


def _show(
    rows: Sequence[Mapping[str, Any]],
    above: Sequence[str],
    console: Console,
) -> None:
    """Print the cells, then the reasons of those that do not run.

    Args:
        rows: of the plan, with or without predictions.
        above: lines above the table.
        console: where to print.
    """
    shown = [row for row in rows if not row["reasons"]]
    for line in above:
        console.print(line, style="italic", highlight=False)
    if shown:
        console.print(TextTable(text_columns(DataFrame(shown, dtype=object), _SHORT)))
    reasons = [f"{row['state']}: {' '.join(row['reasons'])}" * bool(row["reasons"]) for row in rows]
    lines = reason_lines([row["settings"] for row in rows], reasons) if any(reasons) else ()
    for line in lines:
        console.print(line)
    counts = Counter(row["state"] for row in rows).items()
    console.print(" · ".join(f"{state} {count}" for state, count in counts))


def as_columns(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return rows as columns of numbers and text, one column for each setting that varies."""
    return DataFrame(
        [
            {"cell_id": row["cell_id"], "cell": row["cell"], **row["settings"]}
            | {k: v for k, v in row.items() if k not in NOT_VALUES}
            | {"reasons": " ".join(row["reasons"])}
            for row in rows
        ]
    )


# What a plan is to predict, and what it writes (no torch).


def plan(
    session: Session,
    *,
    predict: bool = True,
    hardware: Sequence[str] = (),
    parquet: Path | None = None,
) -> list[dict[str, Any]]:
    """Print every cell with its state and prediction, and return one row per cell (see `overview`).

    Args:
        session: its machine is not used where `hardware` is named.
        predict: whether memory, communication and step time are predicted.
        hardware: devices or profile files to plan for; empty for this machine.
        parquet: file for all columns, or None.

    Raises:
        BadValueError: a device is unknown.
    """
    nodes = {name: machine_with(profile_named(name)) for name in hardware}
    console, settings = open_console(), session.settings
    rows = []
    if len(nodes) > 1 and session.machine in nodes.values():
        smallest = session.machine.described_by
        console.print(
            f"All have the defaults of {smallest}, which has the least memory: plan for one at a time."
        )
    for device, node in nodes.items() or ((None, session.machine),):
        found = overview(session, node)
        title = f"Plan of sweep {settings.path.absolute().name}"
        if device:
            found = replace(found, rows=[row | {"hardware": device} for row in found.rows])
            title += f" on {node.described_by}"
        lines: list[str] = []
        for place in extras.COLUMNS if predict else ():
            added, below = extras.load(place)(found, settings, device, node, console)
            found, lines = replace(found, rows=added), [*lines, *below]
        table = cell_table(found.plan)
        above = [" · ".join([title, *common_settings(table)]), *baseline_line(table)]
        _show(found.rows, above, console)
        print_lines(console, lines)
        if found.store and not device:
            again = f"`vitsweep retry {found.store.name}` runs them again"
            print_notices(found.state, found.plan, found.store, again, console)
        notes = [n for e in found.plan.runnable for n in technique_notes(flatten(e.spec))]
        specs = [e.spec for e in found.plan.runnable if e.spec.data.decodes_files]
        if specs and not device:
            from vitsweep.data.folder_look import reading_notes  # loads Pillow

            notes += reading_notes(specs, MOST_SECONDS_OF_NOTES)
        for sentence in filter(None, (_shared_machine(found.plan, node), *dict.fromkeys(notes))):
            console.print(sentence)
        if found.detectable_effect:
            console.print(found.detectable_effect)
        rows += found.rows
    if parquet:
        as_columns(rows).to_parquet(parquet, index=False)
        console.print(f"All columns: {parquet}")
    return rows


def _shared_machine(plan: SweepPlan, machine: Machine) -> str:
    """Say what cells measure here whose ranks would have more cores, or more nodes; "" where none has."""
    if machine.described_by != HERE or not plan.runnable:
        return ""
    largest = max((entry.spec.resources for entry in plan.runnable), key=lambda r: r.world_size)
    if largest.nodes == 1 and not largest.oversubscribed:
        return ""
    return (
        f"{largest.world_size} ranks of {count(largest.nodes, 'node')} share the {machine.cores_per_node} "
        "cores of this machine: such runs show nothing of that many devices, nor of a network. On a "
        "cluster, add `hydra/launcher=slurm`."
    )


@dataclass(frozen=True, kw_only=True)
class PlanOverview:
    """What a sweep would run and could show.

    Attributes:
        rows: one per cell, see `plan_rows`.
        plan: the cells with their baselines.
        state: what is measured already.
        store: of the sweep; None where none of its cells was frozen yet.
        detectable_effect: a sentence on how small a difference the sweep could show, or ""; of a race,
            how it would proceed.
        screenings: cell id -> screening runs before its blocks, which count among its runs.
    """

    rows: list[dict[str, Any]]
    plan: SweepPlan
    state: ResumeState
    store: Store | None
    detectable_effect: str
    screenings: "Counter[str]"


def overview(session: Session, machine: Machine | None = None) -> PlanOverview:
    """Look up what is measured of the cells, on the session's node or another; nothing is written."""
    machine, settings = machine or session.machine, session.settings
    is_own = machine == session.machine
    planned = session.plan if is_own else session.planned_for(machine)
    sweep_plan = session.launcher.with_paired_baselines(planned)
    store = Store(settings.path) if (settings.path / "cells").is_dir() else None
    runs = list(store.runs()) if store else []
    state = resume_state(sweep_plan, runs, settings, version("torch"))
    screenings = num_screenings(sweep_plan, state, settings)
    rows = plan_rows(sweep_plan, state, settings.cells_per_block, screenings)
    baselines = (store.baselines() if store else {}) | sweep_plan.baselines
    noise = noise_of(runs, baselines)
    if settings.search in extras.ROUNDS:
        begin, folder = extras.load(extras.ROUNDS[settings.search]), store or Store(settings.path)
        outlook = begin(sweep_plan, settings, folder, code_state(), runs).outlook
    else:
        outlook = (
            describe_least_blocks(sweep_plan)
            if settings.minutes
            else describe_detectable_effect(sweep_plan, noise)
        )
        if num := screenings.total():
            then = f"blocks for {settings.minutes:g} min" if settings.minutes else "the blocks"
            outlook += f" First {count(num, 'screening run')}, one short run per cell, then {then}."
    return PlanOverview(
        rows=rows,
        plan=sweep_plan,
        state=state,
        store=store,
        detectable_effect=outlook,
        screenings=screenings,
    )


def plan_rows(
    plan: SweepPlan, state: ResumeState, cells_per_block: int, screenings: "Counter[str]"
) -> list[dict[str, Any]]:
    """Return one row per cell: id, label, settings, state, missing runs, why it is not run, overrides."""
    settings, labels = cell_settings(plan), cell_labels(plan)
    runs = screenings + runs_per_cell(plan, state.missing_blocks, cells_per_block)
    return [
        {
            "cell_id": entry.cell_id,
            "cell": labels[entry.cell_id],
            "settings": settings[entry.cell_id],
            "state": str(state.cell_state(entry)),
            "runs": runs[entry.cell_id],
            "is_baseline": entry.is_added_baseline,
            "reasons": state.reasons(entry),
            "overrides": entry.composed.overrides,
        }
        for entry in plan.entries.values()
    ]
