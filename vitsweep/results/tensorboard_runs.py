"""Write one TensorBoard run per cell, from a task on standard input; run as a separate process.

It uses TensorBoard's own writer, which needs neither TensorFlow nor torch.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitsweep.files import make_folder
from vitsweep.results.store import Store
from vitsweep.results.trackers import by_cell, metrics_of

RUN, CELL = "run", "cell"
"""Prefixes of tags: metrics of each run (one step per run), and metrics of the cell over its runs."""

EVENTS = "events.out.tfevents.*"


def write_runs(task: dict[str, Any]) -> None:
    """Write every cell of the task: its runs as steps, its row, and its spec as hyperparameters."""
    records = by_cell(Store(Path(task["root"])))
    for row in task["cells"]:
        folder = Path(task["root"]) / "tensorboard" / row["cell_id"]
        for before in make_folder(folder).glob(EVENTS):  # the copy has the records as they are now
            before.unlink()
        _write_run(row, records.get(row["cell_id"], []), folder)


def _write_run(row: dict[str, Any], records: list[Any], folder: Path) -> None:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for summary, step in _summaries(row, records):
        writer.add_event(_event(summary, step))
    writer.close()


def _summaries(row: dict[str, Any], records: list[Any]) -> Iterator[tuple[Any, int]]:
    yield _session_start(_choices(records[-1].spec) if records else {}), 0
    for step, record in enumerate(r for r in records if r.status == "measured"):
        yield _scalars(RUN, {k: v for k, v in record.metrics.items() if v is not None}), step
    yield _scalars(CELL, metrics_of(row)), 0


def _session_start(choices: Mapping[str, Any]) -> Any:
    """Return the choices as an hparams summary; the plugin's own helpers would load TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    hparams = HParamsPluginData()
    for name, value in choices.items():
        one = hparams.session_start_info.hparams[name]
        if isinstance(value, bool):  # before numbers: True is an int
            one.bool_value = value
        elif isinstance(value, (int, float)):
            one.number_value = value
        else:
            one.string_value = value
    described = metadata.create_summary_metadata(hparams)
    tag = metadata.SESSION_START_INFO_TAG
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)])


def _choices(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what TensorBoard takes as a hyperparameter; lists become text, missing ones are left out."""
    known = {name: value for name, value in spec.items() if value is not None}
    plain = (str, bool, int, float)
    return {n: v if isinstance(v, plain) else json.dumps(v) for n, v in known.items()}


def _scalars(prefix: str, values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    found = [Summary.Value(tag=f"{prefix}/{m}", simple_value=v) for m, v in values.items()]
    return Summary(value=found)


def _event(summary: Any, step: int) -> Any:
    import time

    from tensorboard.compat.proto.event_pb2 import Event

    return Event(summary=summary, step=step, wall_time=time.time())


if __name__ == "__main__":
    write_runs(json.load(sys.stdin))
