"""Traces of runs are found and linked."""

import gzip
import json
from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.report.html import write_report
from vitsweep.results.store import Store
from vitsweep.tables.sweep_tables import SweepTables

STEP_MS = {"loop": 9.0, "foreach": 3.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A sweep of a ViT and a model without tokens, each cell with a trace from two attempts."""
    store = Store(tmp_path / "optimizer_step").create()
    baselines = {}
    for model, tokens in (("vit_nano", 17), ("own_model", None)):
        for implementation in STEP_MS:
            cell = f"{model}-{implementation}"
            baselines[cell] = f"{model}-loop"
            for block in ("b0", "b1", "b2"):
                spec = {"model": model, "num_tokens": tokens, "optimizer": f"sgd_{implementation}"}
                metrics = {"optimizer_ms": STEP_MS[implementation]}
                record = run(cell, block, metrics=metrics, sweep=store.name, **spec)
                store.save_run(record)
            for attempt in (1, 2):
                folder = store.cell(cell) / "attempts" / f"{record.run_id}.{attempt}"
                folder.mkdir(parents=True)
                (folder / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [1]}'))
    store.append_command({"baselines": baselines, "command": "python -m vitsweep -m ..."})
    return store


def test_the_latest_trace_of_each_cell_is_found(store: Store) -> None:
    found = SweepTables.of(store).traces
    assert set(found) == {f"{m}-{i}" for m in ("vit_nano", "own_model") for i in STEP_MS}
    assert all(path.parent.name.endswith(".2") for path in found.values())


def test_the_report_links_every_trace_and_the_links_lead_there(store: Store) -> None:
    page = write_report(store)
    links = [part.split('"')[0] for part in page.read_text().split('href="')[1:]]
    traces = [link for link in links if link.endswith("trace.json.gz")]
    assert len(traces) == 4
    for link in traces:
        with gzip.open(page.parent / link, "rt") as handle:
            assert json.load(handle)["traceEvents"]
