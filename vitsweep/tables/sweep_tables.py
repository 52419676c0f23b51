"""SweepTables: the tables of one or several sweeps, each computed when it is first asked for, and once."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.extras import FEATURES
from vitsweep.results.metrics import Metrics, known_metrics
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.accuracy import evaluations_of
from vitsweep.tables.effects import effects, waterfall
from vitsweep.tables.load import cells_from, families_of, load, runs_of, stacked, stores_in, tidy
from vitsweep.tables.replicates import replicates
from vitsweep.tables.scaling import exposed_communication, scaling_efficiency
from vitsweep.tables.valid_runs import newest_code


@dataclass(frozen=True, eq=False)
class SweepTables:
    """The tables of sweeps, as the terminal, the report, the gate, the Python API and notebooks read them.

    Attributes:
        stores: of the sweeps.
        is_tidy: choices are ordered categories, for notebooks.
    """

    stores: tuple[Store, ...] = ()
    is_tidy: bool = False

    @classmethod
    def of(cls, source: "SweepTables | Store | Path") -> "SweepTables":
        """Return the tables of one sweep folder, or tables as they are; the runs may be empty."""
        if isinstance(source, SweepTables):
            return source
        return cls((source if isinstance(source, Store) else Store(source),))

    @classmethod
    def read(cls, *folders: str | Path) -> "SweepTables":
        """Read sweep folders, together as one; blocks of different folders are never paired.

        Raises:
            VitsweepError: a folder holds no records.
        """
        found = cls(tuple(store for folder in folders for store in stores_in(Path(folder))), True)
        if found.every_run.empty:
            raise VitsweepError(f"{', '.join(map(str, folders))}: no run has finished yet.")
        return found

    @cached_property
    def commands(self) -> list[dict[str, Any]]:
        """The commands of the sweeps, oldest first."""
        return [command for store in self.stores for command in store.commands()]

    @cached_property
    def baselines(self) -> dict[str, str | None]:
        """Cell -> its baseline cell."""
        return {k: v for store in self.stores for k, v in store.baselines().items()}

    @cached_property
    def _records(self) -> dict[Store, list[RunRecord]]:
        return {store: list(store.runs()) for store in self.stores}

    @property
    def records(self) -> list[RunRecord]:
        """The records of the runs."""
        return [record for records in self._records.values() for record in records]

    @cached_property
    def _runs_of(self) -> dict[Store, DataFrame]:
        return {store: runs_of(store, self._records[store]) for store in self.stores}

    @cached_property
    def every_run(self) -> DataFrame:
        """One row per run, of whichever code."""
        tables = [table for table in self._runs_of.values() if len(table)]
        table = stacked(tables) if tables else DataFrame()
        return tidy(table) if self.is_tidy and len(table) else table

    @cached_property
    def runs(self) -> DataFrame:
        """One row per run, of each cell's newest code."""
        return newest_code(self.every_run)

    @cached_property
    def cells(self) -> DataFrame:
        """One row per cell, sweep and device, measured or not."""
        if self.is_tidy:
            return load(*self.stores)
        [store] = self.stores
        return cells_from(store, self._runs_of[store], self.baselines)

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics that are known of the sweeps: those of every sweep, and the user's own."""
        return known_metrics(self.cells)

    @cached_property
    def replicate_key(self) -> str:
        """Key that the latest command names as repetition; empty if it names none."""
        return str((self.commands[-1].get("replicate") if self.commands else "") or "")

    @cached_property
    def replicates(self) -> DataFrame:
        """One row per setting over its repetitions; empty where the sweep repeats none."""
        return replicates(self.cells, self.replicate_key) if self.replicate_key else DataFrame()

    @property
    def settings(self) -> DataFrame:
        """`replicates` where the sweep repeats settings, else `cells`."""
        return self.replicates if len(self.replicates) else self.cells

    def settings_of(self, cells: DataFrame) -> DataFrame:
        """Return some rows of `cells` as `settings`."""
        found = replicates(cells, self.replicate_key) if self.replicate_key else cells
        return found if len(found) else cells

    @cached_property
    def _ran(self) -> DataFrame:
        return self.cells[self.cells["cell_id"].isin(self.runs["cell_id"])]

    @cached_property
    def waterfall(self) -> DataFrame:
        """Techniques alone and on top of each other."""
        return waterfall(self.runs, self.baselines, cells_=self._ran)

    @cached_property
    def effects(self) -> DataFrame:
        """What every technique brings on average over the other choices."""
        return effects(self.runs, self.baselines)

    @cached_property
    def scaling(self) -> DataFrame:
        """Throughput and efficiency by number of ranks."""
        families = [family for store in self.stores for family in families_of(store)]
        return scaling_efficiency(self.runs, self.baselines, self._ran, families)

    @cached_property
    def exposed_communication(self) -> DataFrame:
        """How much of the communication of every scaling point is hidden behind computation."""
        return exposed_communication(self.runs, self.baselines, curves=self.scaling)

    @cached_property
    def features(self) -> list[str]:
        """The optional features of which these sweeps hold something, and those of every sweep."""
        found = {key for record in self.records for key in record.samples}
        found |= {key for command in self.commands for key, value in command.items() if value}
        found |= {*self.cells}
        kept = {f.kept for f in FEATURES.values() if f.kept}
        found |= {file for store in self.stores for file in kept if (store.root / file).exists()}
        asked = {name: {f.recorded, f.kept} - {""} for name, f in FEATURES.items()}
        return [name for name, keys in asked.items() if not keys or keys & found]

    @cached_property
    def traces(self) -> dict[str, Path]:
        """Cell -> its latest profiler trace, of cells that were run with `measurement.trace=true`."""
        found = (p for store in self.stores for p in store.cells.glob("*/attempts/*/trace.json.gz"))
        newest_last = sorted(found, key=lambda path: path.stat().st_mtime)
        return {path.parents[2].name: path for path in newest_last}

    @cached_property
    def evaluations(self) -> DataFrame:
        """One row per evaluation of a training."""
        found = [evaluations_of(store, runs) for store, runs in self._runs_of.items()]
        return pd.concat(found, ignore_index=True) if found else DataFrame()
