"""The functions of `import vitsweep`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.api.plan import as_columns, overview
from vitsweep.api.session import (
    SUBMITTED,
    Overrides,
    Session,
    as_overrides,
    open_session,
    refuse_second,
)
from vitsweep.api.sweep import Sweep
from vitsweep.composition.hydra import value_override
from vitsweep.console import open_console, print_lines
from vitsweep.errors import SweepStopped
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.sweep_plan import SweepPlan, all_refused
from vitsweep.report.views import collect
from vitsweep.results.store import Store
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.sweep_tables import SweepTables

# Measuring the cells of a session: what the command line and `vitsweep.sweep` both call.


Row = Mapping[Any, Any]


@contextmanager
def measured(session: Session, plan: SweepPlan | None = None) -> Iterator[LaunchResult]:
    """Measure what is missing of the cells, or of those of a round of a search.

    The result is read within the `with` block, while the sweep is locked (see `launchers.base`).

    Raises:
        VitsweepError: something that was asked for cannot be done; nothing has run.
        SweepStopped: when the block ends, if the user stopped the sweep or detached from its jobs.
    """
    with session.launcher.launch_cells(session.request(plan)) as result:
        yield result
    if result.interrupted:
        if not result.submitted:
            session.console.print("Stopped. What was measured is kept; the same command continues.")
        raise SweepStopped


def collected(result: LaunchResult) -> "tuple[SweepTables, DataFrame]":
    """Write the views of the sweep.

    Returns:
        Its tables, and one row per cell of the plan, baselines included.

    Raises:
        ImpossibleCellError: every cell is refused.
    """
    tables = collect(result.store)
    if not result.plan.runnable:
        raise all_refused(result.plan)
    return tables, tables.cells[tables.cells["cell_id"].isin(result.plan.entries)]


def rows_of(cells: DataFrame, plan: SweepPlan) -> list[Row]:
    """Return the rows of the cells that the command named, in their order."""
    rows = {str(row["cell_id"]): row for row in cells.to_dict("records")}
    return [rows[entry.cell_id] for entry in plan.named]


def submitted_rows(plan: SweepPlan) -> list[Row]:
    """Return a row for each cell that was named, where they still have to run somewhere else."""
    return [{"cell_id": entry.cell_id, "status": SUBMITTED} for entry in plan.named]


WAIT = "hydra.launcher.wait"


def sweep(
    overrides: Overrides = (),
    *,
    launcher: str = "local",
    name: str | None = None,
    config_dir: str | Path | None = None,
    show: bool = True,
    **settings: Any,
) -> Sweep:
    """Measure every combination of some settings, and the baseline that speedups divide by.

    What is measured already in the sweep's folder is not measured again; a wider grid under the
    same name adds to it.

    Args:
        overrides: in the grammar of the command line: `["precision=O1,O2", "sharding=ddp,fsdp"]`.
        launcher: `local` measures here and returns when all cells are measured; `slurm` submits
            jobs and returns at once (see `Sweep.wait`), unless `hydra.launcher.wait=true` is given.
        name: of the folder below `results/`; by default from model, data and the keys that vary.
        config_dir: folder with choices, groups and named sweeps of your own.
        show: print progress and notices.
        settings: the same as overrides by name: `model="vit_small"`, `precision=["O1", "O2"]`,
            `batch={"images_per_step": 64}`. A list sweeps its key.

    Returns:
        The sweep. Cells that ended otherwise than measured have their status and reason in
        `Sweep.cells`.

    Raises:
        BadValueError: an override is wrong; nothing has run.
        ImpossibleCellError: every cell is refused; all reasons are named.
        VitsweepError: the folder or the cluster cannot be used.
        KeyboardInterrupt: the user stopped it; the same call continues.
    """
    session = _session(overrides, settings, launcher, name, config_dir, show)
    if session.searches:
        session.searches.measure(session)
        return Sweep(Store(session.settings.path))
    with measured(session) as result:
        if not result.submitted:
            tables, cells = collected(result)
            print_lines(session.console, empty_metrics(tables.runs))
            if session.tracker:
                session.console.print(session.tracker(result.store, cells, ()))
    return Sweep(result.store, tuple(entry.cell_id for entry in result.plan.named))


def plan(
    overrides: Overrides = (),
    *,
    launcher: str = "local",
    name: str | None = None,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> "DataFrame":
    """Return what `sweep` with the same arguments would run; nothing is trained or written.

    Args:
        overrides: as for `sweep`.
        launcher: as for `sweep`; `slurm` plans for a node of the cluster.
        name: as for `sweep`.
        config_dir: as for `sweep`.
        settings: as for `sweep`.

    Returns:
        One row per cell, baselines included: `cell_id`, `cell` (what distinguishes it), one column per
        setting that varies, `state` (`runnable`, `measured`, `invalid`, ...), `runs` that it lacks,
        `is_baseline`, and `reasons` why it is not run.

    Raises:
        BadValueError: an override is wrong.
    """

    session = _session(overrides, settings, launcher, name, config_dir, show=False)
    found = overview(session)
    table = as_columns(found.rows)
    table.attrs["detectable_effect"] = found.detectable_effect
    return table


def _session(
    overrides: Overrides,
    settings: Mapping[str, Any],
    launcher: str,
    name: str | None,
    config_dir: str | Path | None,
    show: bool,
) -> Session:
    texts = as_overrides(overrides, settings)
    typed = {text.lstrip("+").partition("=")[0] for text in texts}
    if "hydra/launcher" not in typed:
        texts.append(value_override("hydra/launcher", launcher))
        if launcher == "slurm" and WAIT not in typed:
            texts.append(f"{WAIT}=false")
    if name is not None:
        named = value_override("sweep.name", name)
        refuse_second(texts, named)
        texts.append(named)
    return open_session(texts, console_for(show), config_dir)


def console_for(show: bool) -> Console:
    """Return the console of a call: stderr, or none where nothing is to be shown."""
    return open_console(stderr=True) if show else Console(quiet=True)
