"""The table that each chart draws; empty where the sweep has no data for the chart."""

from pandas import DataFrame

from vitsweep.charts.phases import PHASES
from vitsweep.charts.series import labels
from vitsweep.results.record import Status
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.tables import budget
from vitsweep.tables import communication as communication_table
from vitsweep.tables import limits as limits_table
from vitsweep.tables import optimizer_steps as optimizer_table
from vitsweep.tables.accuracy import training_curves
from vitsweep.tables.effects import BASELINE
from vitsweep.tables.names import varying, with_changes
from vitsweep.tables.pareto import pareto_front
from vitsweep.tables.per_chip import per_chip
from vitsweep.tables.race import race_history
from vitsweep.tables.roofline import roofline
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.tidy import ordered
from vitsweep.tables.traces import optimizer_traces

NOTHING = DataFrame()
LARGE_IMAGE_PX = 128
"""Smallest images for which hours per ImageNet epoch are shown."""


def speedups(tables: SweepTables) -> DataFrame:
    """Return the cells where at least one is compared with another."""
    return tables.settings if tables.settings["speedup"].notna().sum() > 1 else NOTHING


def steps(tables: SweepTables) -> DataFrame:
    """Return the waterfall where at least two techniques stand alone or on top of each other."""
    if any(_mixed(group) for _, group in tables.settings.groupby("baseline_cell_id")):
        return NOTHING
    table = tables.waterfall
    return table if table["speedup"].notna().sum() > 2 else NOTHING


def two_groups(cells: DataFrame) -> tuple[str, str]:
    """Return the two technique groups whose combinations are covered best, the larger first."""
    groups = [c for c in varying(cells) if c in TECHNIQUE_GROUPS]
    pairs = [(a, b) for i, a in enumerate(groups) for b in groups[i + 1 :]]
    return max(pairs, key=lambda pair: len(cells[list(pair)].astype(str).drop_duplicates()))


def grid(tables: SweepTables) -> DataFrame:
    """Return the cells where two technique groups form a grid that is filled by two thirds."""
    cells = tables.settings
    if (
        len([c for c in varying(cells) if c in TECHNIQUE_GROUPS]) < 2
        or not cells["speedup"].notna().any()
    ):
        return NOTHING
    pair = list(two_groups(cells))
    combinations = len(cells[pair].astype(str).drop_duplicates())
    size = cells[pair[0]].nunique() * cells[pair[1]].nunique()
    return cells if combinations >= 4 and combinations >= 2 / 3 * size else NOTHING


def phases(tables: SweepTables) -> DataFrame:
    """Return the cells where any has a phase."""
    cells = tables.settings
    known = any(p in cells and cells[p].notna().any() for p in PHASES)
    return cells if known else NOTHING


def optimizer_steps(tables: SweepTables) -> DataFrame:
    """Return optimizer steps of cells that change nothing else, where there are two or more."""
    changed = with_changes(tables.settings)
    if "optimizer_ms" not in changed or changed.empty:
        return NOTHING
    alone = changed[[all(c.startswith("optimizer=") for c in s) for s in changed["changes"]]]
    if alone["optimizer_ms"].notna().sum() < 2:
        return NOTHING
    table = optimizer_table.optimizer_steps(alone)
    return table if len(table) > 1 and table["implementation"].nunique() > 1 else NOTHING


def traced_steps(tables: SweepTables) -> DataFrame:
    """Return traced steps where two implementations of one optimizer left a trace."""
    return optimizer_traces(tables.settings, tables.traces)


def curves(tables: SweepTables) -> DataFrame:
    """Return the scaling curves, where all points ran on one kind of device."""
    if tables.settings["world_size"].nunique() < 2 or _mixed(tables.settings):
        return NOTHING
    table = tables.scaling.copy()
    fits = tables.predicted_scaling.to_dict("records")
    table.attrs["predicted"] = fits  # attributes are compared: no tables in them
    return table


def exposed(tables: SweepTables) -> DataFrame:
    """Return how much of the communication is hidden, where scaling curves ran on one kind of device."""
    if tables.runs.empty or tables.settings["world_size"].nunique() < 2 or _mixed(tables.settings):
        return NOTHING
    return tables.exposed_communication


def technique_effects(tables: SweepTables) -> DataFrame:
    """Return the effects of the techniques that were crossed: measured with several choices of another.

    With one other choice only, an average is the plain speedup, which has a chart of its own.
    """
    table = tables.effects
    given = table[(table["kind"] == "given") & table["effect"].notna()]
    other = given["given"].astype(str).str.split("=").str[0]
    counts = given[other != BASELINE].groupby(["technique", other]).size()
    crossed = set(counts.index[counts > 1].get_level_values("technique"))
    return table[table["technique"].isin(crossed)] if len(crossed) > 1 else NOTHING


def phases_on_the_roofline(tables: SweepTables) -> DataFrame:
    """Return rate and intensity of the phases, where FLOPs and parameters were counted."""
    return roofline(tables.settings)


def several_techniques(tables: SweepTables) -> DataFrame:
    """Return the scaling curves where there are several to compare."""
    table = curves(tables)
    return table if len(table) and labels(table).nunique() > 1 else NOTHING


def limits(tables: SweepTables) -> DataFrame:
    """Return the table of limits, where the sweep searched for one."""
    if not tables.limit_key:
        return NOTHING
    table = limits_table.limits(tables.settings, tables.limit_key)
    table.attrs["key"] = tables.limit_key
    return table


def race(tables: SweepTables) -> DataFrame:
    """Return the cells of a race with the blocks in which each ran and led."""
    table = race_history(tables.race)
    return table if len(table) > 1 and (table["runs"] > 0).any() else NOTHING


def lengths(tables: SweepTables) -> DataFrame:
    """Return the measured and out-of-memory cells where one method was tried at three lengths."""
    cells = tables.settings[tables.settings["status"].isin([Status.measured, Status.out_of_memory])]
    if cells["num_tokens"].nunique() < 3 or cells["tokens_per_second"].isna().all():
        return NOTHING
    tried = cells["num_tokens"].groupby(labels(cells)).nunique()
    return ordered(cells).copy() if tried.max() >= 3 else NOTHING  # in one piece


def communication(tables: SweepTables) -> DataFrame:
    """Return the bytes sent, where anything was sent."""
    table = communication_table.communication(tables.settings)
    return table[table["bytes_per_step"] > 0]


def memory(tables: SweepTables) -> DataFrame:
    """Return the cells where peaks are known and more than one cell can be compared."""
    peaks = budget.with_peak(tables.settings)["peak_gib"].notna().sum()
    return tables.settings if peaks > 1 else NOTHING


def front(tables: SweepTables) -> DataFrame:
    """Return the Pareto front where three cells of one device have throughput and memory."""
    if _mixed(tables.settings):
        return NOTHING
    enough = budget.measured_with_peak(tables.settings)["peak_gib"].notna().sum() > 2
    return pareto_front(tables.settings, runs=tables.runs) if enough else NOTHING


def accuracies(tables: SweepTables) -> DataFrame:
    """Return the settings with their accuracies, where they were repeated and two were trained."""
    cells = tables.settings
    if "accuracy_claim" not in cells or _mixed(cells):
        return NOTHING
    trained = cells["accuracy_top1"].notna() & cells["speedup"].notna()
    return cells if trained.sum() > 1 else NOTHING


def trainings(tables: SweepTables) -> DataFrame:
    """Return the trained cells with their curves; seconds of two kinds of device have no mean."""
    if tables.evaluations.empty or _mixed(tables.settings):
        return NOTHING
    table = training_curves(tables.settings, tables.runs, tables.evaluations)
    return table if table["curves"].map(bool).any() else NOTHING


def epochs(tables: SweepTables) -> DataFrame:
    """Return hours per epoch where images have the size of ImageNet's."""
    large = tables.settings[tables.settings["resolution_px"] >= LARGE_IMAGE_PX]
    return budget.epoch_hours(large) if len(large) > 1 else NOTHING


def chips(tables: SweepTables) -> DataFrame:
    """Return throughput per chip where several kinds of device were measured."""
    return per_chip(tables.settings) if _mixed(tables.settings) else NOTHING


def _mixed(cells: DataFrame) -> bool:
    """Return whether the measured cells ran on several kinds of device."""
    measured = cells[cells["status"] == Status.measured]
    return "device" in measured and measured["device"].nunique() > 1
