"""A whole sweep whose data come slower than the model trains: throughput is that of the data."""

from statistics import median

import pytest

from tests.command import Command
from tests.slow_loader import SECONDS_PER_BATCH
from vitsweep.results.record import RunRecord


@pytest.mark.slow
def test_throughput_is_images_over_the_wall_time_of_the_window(vitsweep: Command) -> None:
    done = vitsweep(
        "sweep.baseline=null",
        "data._target_=tests.slow_loader.SlowDigits", "resources.threads_per_rank=1",
        "measurement.measured_steps=16", "measurement.min_seconds=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [record] = vitsweep.store.runs()
    wall = max(wall_seconds(vitsweep, record, rank) for rank in range(2))
    images = 16 * record.validity["steps_counted"]
    found = record.metrics["images_per_second"]
    assert found == pytest.approx(images / wall, rel=0.1)
    assert found < 1.15 * 16 / SECONDS_PER_BATCH, "no faster than the loader"
    assert record.metrics["window_seconds"] >= 2
    assert record.validity["uneven_steps"] is True
    assert record.validity["uneven_steps_cause"] == "data"
    begin = record.samples["warm_up_steps"]
    times = max((rank[begin:] for rank in record.samples["step_time_ms"]), key=sum)
    assert 16e3 / median(times) > 1.2 * found, "a median over steps would not see the loader"


def wall_seconds(vitsweep: Command, record: RunRecord, rank: int) -> float:
    """From the request of the first batch of the window to the request after its last one."""
    name = f"requests-rank{rank}.log"
    requests = [float(line) for line in (vitsweep.folder / name).read_text().split()]
    steps = len(record.samples["step_time_ms"][rank])
    return requests[steps] - requests[record.samples["warm_up_steps"]]
