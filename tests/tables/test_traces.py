"""A trace of a real step is read, drawn and linked."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from tests.builders import run
from tests.model.test_resnet import SMALL
from vitsweep.charts import trace as chart
from vitsweep.measure.communication import quiet_profile
from vitsweep.model.resnet import ResNet
from vitsweep.report.html import write_report
from vitsweep.results.store import Store
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.traces import spans, traces_of

STEP_MS = {"loop": 9.0, "foreach": 3.0}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One step of SGD by either implementation, under torch's profiler."""
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for implementation in STEP_MS:
        model = ResNet(SMALL)
        foreach = implementation == "foreach"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        images = torch.randn(2, 3, 8, 8)
        for _ in range(2):  # the first step makes the momentum
            with quiet_profile([ProfilerActivity.CPU]) as profiled:
                model(images).sum().backward()
                optimizer.step()
        found[implementation] = folder / f"{implementation}.json.gz"
        profiled.export_chrome_trace(str(found[implementation]))
    return found


@pytest.fixture
def store(tmp_path: Path, traced: dict[str, Path]) -> Store:
    """A sweep of a ViT and a ResNet, each cell with a trace from two attempts."""
    store = Store(tmp_path / "optimizer_step").create()
    baselines = {}
    for model, tokens in (("vit_nano", 17), ("resnet_nano", None)):
        for implementation, path in traced.items():
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
                shutil.copyfile(path, folder / "trace.json.gz")
    store.append_command({"baselines": baselines, "command": "python -m vitsweep -m ..."})
    return store


def test_the_operations_are_the_outermost_ones_in_their_order(traced: dict[str, Path]) -> None:
    with gzip.open(traced["loop"], "rt") as handle:  # a Chrome trace: JSON with `traceEvents`
        events = json.load(handle)["traceEvents"]
    whole = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    table = spans(traced["loop"])
    assert 0 < len(table) < len(whole)
    assert table["start_ms"].iloc[0] == 0
    assert table["start_ms"].is_monotonic_increasing
    assert set(table["lane"]) == {"host"}


def test_the_optimizer_step_has_an_operation_per_parameter_or_few_for_all(
    traced: dict[str, Path],
) -> None:
    parameters = len(list(ResNet(SMALL).parameters()))
    loop, foreach = (spans(traced[i]).query("in_optimizer") for i in STEP_MS)
    assert len(loop) >= 2 * parameters
    assert 0 < len(foreach) < parameters
    others = spans(traced["loop"]).query("not in_optimizer")
    assert others["start_ms"].max() < loop["start_ms"].min()


def test_the_latest_trace_of_each_cell_is_found(store: Store) -> None:
    found = traces_of(store)
    assert set(found) == {f"{m}-{i}" for m in ("vit_nano", "resnet_nano") for i in STEP_MS}
    assert all(path.parent.name.endswith(".2") for path in found.values())


def test_the_pair_of_a_resnet_under_sgd_is_drawn_the_loop_on_top(store: Store) -> None:
    table = chart.table_of(SweepTables.read(store.root))
    assert list(dict.fromkeys(table["cell_id"])) == ["resnet_nano-loop", "resnet_nano-foreach"]
    [axes] = chart.draw(table).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["sgd loop", "sgd foreach"]
    assert axes.get_xlabel() == "Time since the optimizer step of resnet_nano began (ms)"
    told = [text.get_text() for text in axes.texts]
    operations = [int(text.split()[0]) for text in told]
    assert operations[0] > 10 * operations[1]
    assert all(text.endswith(" ms") for text in told)


def test_one_implementation_alone_is_no_pair(store: Store) -> None:
    for cell in store.cells.glob("*-foreach"):
        shutil.rmtree(cell / "attempts")
    assert chart.table_of(SweepTables.read(store.root)).empty


def test_the_report_links_every_trace_and_the_links_lead_there(store: Store) -> None:
    page = write_report(store)
    links = [part.split('"')[0] for part in page.read_text().split('href="')[1:]]
    traces = [link for link in links if link.endswith("trace.json.gz")]
    assert len(traces) == 4
    for link in traces:
        with gzip.open(page.parent / link, "rt") as handle:
            assert json.load(handle)["traceEvents"]
    assert (page.parent / "trace.svg").exists()
