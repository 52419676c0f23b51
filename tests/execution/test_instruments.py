"""Which runs of a cell have instruments after their timed steps."""

from pathlib import Path

from tests.cells import entry
from tests.command import QUICK
from vitsweep.execution.outcome import NO_INSTRUMENTS
from vitsweep.execution.run_request import Run, frozen_document
from vitsweep.execution.runner import LocalExecutor, Runner
from vitsweep.results.record import SCREENING, RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.load import cells_of

ONE = (*QUICK, "resources.ranks_per_node=1", "sharding=none", "measurement.prove=none")


def test_three_runs_of_a_cell_have_instruments_and_later_ones_say_why_not(tmp_path: Path) -> None:
    cell = entry(*ONE)
    store = Store(tmp_path / "sweep").create()
    store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, (), {}))
    runner = Runner(store, LocalExecutor(store, {}))

    def attempt(block: str, purpose: str = "") -> RunRecord:
        run = Run.new(block, 0, cell.cell_id, purpose)
        return runner.attempt(runner.request(run, cell.spec), cell.spec)

    warm_up = runner.warm_up(runner.request(Run.new("b0", 0, cell.cell_id), cell.spec), cell.spec)
    assert NO_INSTRUMENTS in warm_up.environment
    attempt("screening", SCREENING)  # enters no interval
    records = [attempt(f"b{n}") for n in range(4)]
    assert all(record.metrics["images_per_second"] for record in records)
    assert ["forward_ms" in record.metrics for record in records] == [True] * 3 + [False]
    assert ["gradient_gib" in record.metrics for record in records] == [True] * 3 + [False]
    reasons = [record.environment.get(NO_INSTRUMENTS) for record in records]
    assert [bool(reason) for reason in reasons] == [False, False, False, True]
    row = cells_of(store).iloc[0]
    assert row["attention_kernel"] == records[0].environment["attention_kernel"] is not None
    again = Runner(store, LocalExecutor(store, {})).request(
        Run.new("b4", 0, cell.cell_id), cell.spec
    )
    assert again.instruments, "of each command"


def test_a_run_that_was_asked_for_a_trace_has_its_instruments_always(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep").create()
    runner = Runner(store, LocalExecutor(store, {}))
    for asked, expected in (("trace=false", False), ("trace=true", True), ("traced_steps=2", True)):
        cell = entry(*ONE, f"measurement.{asked}")
        store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, (), {}))
        runner._instrumented[cell.cell_id] = 3
        request = runner.request(Run.new("b", 0, cell.cell_id), cell.spec)
        assert request.instruments is expected
