"""Damaged tables through every public table function: a table, or an error that names the column."""

import math
import warnings
from collections.abc import Callable, Iterator

import pandas as pd
import pytest
from pandas import DataFrame

from analysis.cost import cost, epoch_hours
from analysis.meta_blog import per_chip
from tests.builders import from_runs, run, table
from vitsweep import extras
from vitsweep.charts.step import optimizer_steps
from vitsweep.charts.style import caption
from vitsweep.errors import VitsweepError
from vitsweep.report.answer import answers, question
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.diagnostics import diagnostics
from vitsweep.tables.effects import waterfall
from vitsweep.tables.load import tidy
from vitsweep.tables.names import cell_names, with_changes
from vitsweep.tables.render import cell_text, ranked
from vitsweep.tables.scaling import communication, scaling_efficiency
from vitsweep.tables.speedup import speedup_over

SETTINGS = {
    "base": (100, {}),
    "o1": (130, {"precision": "O1"}),
    "fsdp": (90, {"sharding": "fsdp"}),
    "both": (120, {"precision": "O1", "sharding": "fsdp"}),
    "wide": (180, {"world_size": 4}),
}
BASELINES: dict[str, str | None] = dict.fromkeys(SETTINGS, "base")
METRICS = {
    "peak_rss_gib": 1.0,
    "optimizer_ms": 3.0,
    "gradient_bytes_per_step": 8.0,
    "parameter_gib": 1.0,
}


def whole_runs() -> DataFrame:
    return table(
        *(
            run(c, f"b{i}", speed + i, minute=i, metrics=dict(METRICS), **spec)
            for c, (speed, spec) in SETTINGS.items()
            for i in range(3)
        )
    )


OF_RUNS: dict[str, Callable[[DataFrame], object]] = {
    "speedup_over": lambda t: speedup_over(t, BASELINES),
    "cells": lambda t: cells(t, BASELINES),
    "waterfall": lambda t: waterfall(t, BASELINES),
    "scaling_efficiency": lambda t: scaling_efficiency(t, BASELINES),
    "diagnostics": lambda t: diagnostics(t, BASELINES),
    "answers of runs": lambda t: answers(from_runs(t, BASELINES)),
}
if "gate" in extras.FEATURES:
    gate = extras.load("gate.gate:gate")
    OF_RUNS |= {
        "gate": lambda t: gate(t, t, baselines=BASELINES),
        "gate against whole runs": lambda t: gate(t, whole_runs(), baselines=BASELINES),
    }
OF_CELLS: dict[str, Callable[[DataFrame], object]] = {
    "cell_text": cell_text,
    "cell_text wide": lambda t: cell_text(t, wide=True),
    "ranked": ranked,
    "epoch_hours": epoch_hours,
    "cost": lambda t: cost(t, 1.0, 1.0),
    "per_chip": per_chip,
    "communication": communication,
    "optimizer_steps": optimizer_steps,
    "with_changes": with_changes,
    "cell_names": cell_names,
    "tidy": tidy,
    "answers": lambda t: answers(from_runs(whole_runs(), BASELINES, t)),
    "question": question,
    "caption": caption,
}


if "limit" in extras.FEATURES:
    limits = extras.load("limit.table:limits")
    OF_CELLS["limits"] = lambda t: limits(t, "world_size")
if "pareto" in extras.FEATURES:
    OF_CELLS["pareto_front"] = extras.load("pareto.charts.pareto:pareto_front")


def damaged(whole: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Yield name and table: 40 and more ways in which a table of runs or cells is not as it should be."""
    yield "no columns", DataFrame()
    yield "no columns, three rows", DataFrame(index=[0, 1, 2])
    yield "no rows", whole.iloc[:0]
    yield "one row", whole.iloc[:1]
    yield "reversed", whole.iloc[::-1]
    yield "index of texts", whole.set_index(whole["cell_id"].to_numpy())
    yield "every row twice", pd.concat([whole, whole])
    yield "every row twice, new index", pd.concat([whole, whole], ignore_index=True)
    yield (
        "other numbers in the second half",
        pd.concat([whole, whole.assign(images_per_second=1e3)], ignore_index=True),
    )
    for status in (Status.failed, Status.out_of_memory, Status.invalid, None, "no status of ours"):
        yield f"all {status}", whole.assign(status=status, images_per_second=math.nan)
    for name, value in {
        "nan": math.nan,
        "inf": math.inf,
        "-inf": -math.inf,
        "0": 0.0,
        "-5": -5.0,
    }.items():
        yield f"throughput {name}", whole.assign(images_per_second=value)
        some = whole["images_per_second"].where(whole["cell_id"] != "base", value)
        yield f"throughput of the baseline {name}", whole.assign(images_per_second=some)
    for column in (
        "images_per_second",
        "world_size",
        "images_per_step",
        "peak_rss_gib",
        "step_time_ms",
    ):
        yield f"text in {column}", whole.assign(**{column: "fast"})
        yield f"None in {column}", whole.assign(**{column: None})
    for column in ("cell_id", "status", "sweep", "device", "images_per_second", "world_size", "model",
                   "images_per_step", "num_tokens", "reason", "precision", "optimizer", "sharding",
                   "sequence_parallel", "optimizer_ms", "step_time_ms", "started_at"):  # fmt: skip
        if column in whole:
            yield f"no column {column}", whole.drop(columns=column)
    for column in ("cell_id", "status", "sweep", "device"):
        yield f"null {column}", whole.assign(**{column: None})
        yield (
            f"null {column} once",
            whole.assign(**{column: whole[column].astype(object).where(whole.index != 1, None)}),
        )
    yield "numbers as cell ids", whole.assign(cell_id=range(len(whole)))
    yield "zero ranks", whole.assign(world_size=0)
    yield "categories", whole.astype({"precision": "category", "device": "category"})


def damaged_runs() -> list[tuple[str, DataFrame]]:
    whole = whole_runs()
    more = [
        ("no column block", whole.drop(columns="block")),
        ("null block", whole.assign(block=None)),
        ("one block", whole.assign(block="b0")),
        ("other devices", whole.assign(device=[f"d{i}" for i in range(len(whole))])),
        ("other sweeps", whole.assign(sweep=[f"s{i}" for i in range(len(whole))])),
    ]
    return [*damaged(whole), *more]


def damaged_cells() -> list[tuple[str, DataFrame]]:
    whole = cells(whole_runs(), BASELINES)
    more = [
        ("no column baseline", whole.drop(columns="baseline_cell_id")),
        ("no column speedup", whole.drop(columns="speedup")),
        ("no column claim", whole.drop(columns=["claim", "speedup_low", "speedup_high"])),
        ("a baseline that is not there", whole.assign(baseline_cell_id="gone")),
        ("text in speedup", whole.assign(speedup="fast")),
        ("two devices", whole.assign(device=["a", "b", "a", "b", "a"])),
    ]
    return [*damaged(whole), *more]


def outcome(function: Callable[[DataFrame], object], frame: DataFrame) -> str:
    """Return what went wrong; empty where there is a result, or an error in plain words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(frame.copy())
    except VitsweepError as error:
        return "" if len(str(error)) > 20 else f"too short: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_there_are_more_than_40_frames():
    assert len(damaged_runs()) >= 40
    assert len(damaged_cells()) >= 40


@pytest.mark.full
@pytest.mark.parametrize("name", OF_RUNS)
def test_tables_of_runs_survive(name):
    found = {frame: outcome(OF_RUNS[name], runs) for frame, runs in damaged_runs()}
    assert {frame: text for frame, text in found.items() if text} == {}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OF_CELLS)
def test_tables_of_cells_survive(name, every):
    """Each function meets every fourth frame, beginning with another one; all of them in `full`."""
    frames = damaged_cells()[list(OF_CELLS).index(name) % every :: every]
    found = {frame: outcome(OF_CELLS[name], some) for frame, some in frames}
    assert {frame: text for frame, text in found.items() if text} == {}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"images_per_second": "fast"}, "`images_per_second`.* `fast`"),
        ({"cell_id": None}, r"`cell_id`.* \b5\b"),
    ],
)
def test_the_error_names_column_and_rule(damage, message):
    whole = cells(whole_runs(), BASELINES).assign(**damage)
    for function in (cell_text, epoch_hours, per_chip):
        with pytest.raises(VitsweepError, match=message):
            function(whole)


def test_throughput_that_is_no_throughput_never_ranks_first():
    for bad in (math.inf, -5.0, math.nan):
        whole = cells(whole_runs(), {}).astype({"images_per_second": float})
        whole.loc[whole["cell_id"] == "both", "images_per_second"] = bad
        assert ranked(whole)["cell_id"].iloc[-1] == "both"
        assert ranked(whole)["cell_id"].iloc[0] == "wide"
