"""Sweep: a sweep folder in Python, with its tables, charts and jobs."""

from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.errors import VitsweepError
from vitsweep.extras import METHODS
from vitsweep.extras import load as load_feature
from vitsweep.report.answer import answers
from vitsweep.report.views import collect
from vitsweep.results.store import Store
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.formatting import tally
from vitsweep.tables.names import cell_names, varying_columns
from vitsweep.tables.render import cell_text, ranked
from vitsweep.tables.sweep_tables import SweepTables

if TYPE_CHECKING:
    from pandas import DataFrame


SPEEDUP = (
    "images_per_second", "speedup", "speedup_low", "speedup_high", "claim", "num_pairs", "status",
    "sweep", "cell_id",
)  # fmt: skip
"""Columns of `Sweep.speedups`, after those that distinguish the cells; `apply` reads the last two."""


class Sweep:
    """A sweep folder. Tables are read anew at each access, so that they show what was measured since.

    Args:
        folder: of the sweep; it holds `cells/`.
        command_cells: ids of the cells that a call of `vitsweep.sweep` named; empty for all.

    Raises:
        VitsweepError: there is no sweep in the folder.
    """

    def __init__(self, folder: str | Path | Store, command_cells: tuple[str, ...] = ()) -> None:
        if not isinstance(folder, Store) and not (Path(folder) / "cells").is_dir():
            raise VitsweepError(
                f"`{folder}` holds no sweep: name a folder with `cells/`, such as `results/default`."
            )
        self._store = folder if isinstance(folder, Store) else Store(Path(folder))
        self.command_cells = command_cells

    @property
    def folder(self) -> Path:
        """The sweep's folder; all that was measured is in it."""
        return self._store.root

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self._store.name

    @property
    def cells(self) -> "DataFrame":
        """One row per cell over its runs, measured or not; `results/metrics.py` defines the columns."""
        return self._tables.cells

    @property
    def runs(self) -> "DataFrame":
        """One row per run, of each cell's newest code."""
        return self._tables.runs

    def speedups(self) -> "DataFrame":
        """Return the cells with the largest speedup first.

        Returns:
            `cell` (what distinguishes it), the settings that vary, throughput in images/s, the speedup
            over the baseline with its 95 % interval, the claim adjusted over all cells of the
            question, the number of paired blocks, the status, and what `vitsweep.apply` needs.
        """
        cells = self.cells
        columns = [*varying_columns(cells), *SPEEDUP]
        ordered = ranked(cells.assign(cell=cell_names(cells)))
        return ordered.reindex(columns=["cell", *columns]).reset_index(drop=True)

    def answers(self) -> list[str]:
        """Return the result in sentences, as terminal and report show it: which cell is fastest."""
        return answers(self._tables)

    def __getattr__(self, name: str) -> Any:
        """Return a method that an optional feature adds."""
        if name not in METHODS:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return partial(load_feature(METHODS[name]), self._store)

    def report(self) -> "Report":
        """Write tables, charts and one HTML page into `folder/report`; a notebook shows the page.

        Raises:
            VitsweepError: the sweep has no cells.
        """
        from vitsweep.report.html import write_report

        return Report(write_report(collect(self._tables)))

    def status(self) -> "DataFrame":
        """Return one row per cell: `cell_id`, `status` and `reason`.

        The status of a cell whose runs are still to come is `waiting` or `running`, from any
        process that sees the folder.
        """
        from pandas import DataFrame

        from vitsweep.launchers.slurm.state.poll import poll
        from vitsweep.launchers.slurm.state.status import outcomes_of

        found = outcomes_of(self._store, poll(self._store))
        rows = [(cell_id, str(o.status), o.reason) for cell_id, o in found.items()]
        return DataFrame(rows, columns=["cell_id", "status", "reason"])

    def wait(self, minutes: float | None = None) -> "Sweep":
        """Wait until no job of the sweep is waiting or running on the cluster; return the sweep.

        Args:
            minutes: give up after so long; None waits as long as it takes.

        Raises:
            TimeoutError: jobs are still live after `minutes`.
        """
        from vitsweep.launchers.slurm.state.status import wait_for_jobs

        if not wait_for_jobs(self._store, None if minutes is None else 60 * minutes):
            raise TimeoutError(
                f"Jobs of sweep {self.name} are still live after {minutes:g} min; they continue, and "
                "`wait()` can be called again."
            )
        collect(self._store)
        return self

    def __repr__(self) -> str:
        counts = tally(self.cells.get("status", ())) or "no cells"
        return f"<vitsweep.Sweep {self.name!r} in {self.folder}: {counts}>"

    def _repr_html_(self) -> str:
        """Show the answer, the table and the speedup chart in a notebook."""
        cells = self.cells
        if cells.empty:
            return f"<p>{escape(repr(self))}</p>"
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.answers())
        table = cell_text(cells).to_html(index=False)
        return f"<h4>Sweep {escape(self.name)}</h4>{sentences}{table}{self._chart()}"

    def _chart(self) -> str:
        from vitsweep.charts import speedup, style

        tables = self._tables
        if not speedup.SPEEDUP.is_for(tables.settings):
            return ""
        figure = speedup.draw(table := speedup.table_of(tables))
        style.name_baseline(figure, tables.settings, table)
        return style.to_svg(style.freeze_layout(figure))

    @property
    def _tables(self) -> "SweepTables":
        return SweepTables.of(self._store)


class Report:
    """A written report.

    Attributes:
        path: of its `index.html`, one self-contained page.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<vitsweep.Report {self.path}>"

    def _repr_html_(self) -> str:
        """Show the page in a notebook; it brings all that it needs with it."""
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:70vh;border:0"></iframe>'


def load(sweep: str | Path | None = None) -> Sweep:
    """Open a sweep that exists.

    Args:
        sweep: its folder, or its name below `results/`; None for the sweep of the latest command.

    Raises:
        VitsweepError: there is no such sweep; the text lists those that there are.
    """
    return Sweep(find_sweep(None if sweep is None else str(sweep)))
