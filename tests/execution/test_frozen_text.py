"""A worker runs what its command froze, or nothing."""

from pathlib import Path

import pytest
import yaml

from tests.cells import LAPTOP, entry
from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import Run, frozen_document, read_cell, request_for
from vitsweep.execution.runner import LocalExecutor, supervise
from vitsweep.results.record import Status
from vitsweep.results.store import Store


def test_a_cell_that_was_changed_since_it_was_frozen_does_not_run(tmp_path: Path) -> None:
    cell = entry(
        "resources.ranks_per_node=1", "sharding=none", "measurement.prove=none", machine=LAPTOP
    )
    store = Store(tmp_path / "sweep").create()
    store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, (), {}))
    request = request_for(store, Run.new("b0", 0, cell.cell_id))
    path = store.cell(cell.cell_id) / "cell.yaml"
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(document | {"code": {"git_commit": "x"}, "overrides": ["x"]}))
    of_worker = Store(store.root, {cell.cell_id: request.digest})
    assert read_cell(of_worker, cell.cell_id) == cell.spec, "the same cell"

    document["cell"]["optimizer"]["learning_rate"] = 0.5
    path.write_text(yaml.safe_dump(document))
    record = supervise(request, cell.spec, LocalExecutor(store, {}).start)
    assert record.status == Status.failed
    assert f"{cell.cell_id}/cell.yaml`" in record.reason
    for refusing in (of_worker, Store(store.root, {cell.cell_id: ""})):
        with pytest.raises(VitsweepError, match=r"cell\.yaml`"):
            read_cell(refusing, cell.cell_id)
    assert read_cell(Store(store.root), cell.cell_id) != cell.spec, "values may be read"
