"""A clock that was set back, or that another node has: what is newest does not hang on it."""

from dataclasses import replace

from tests.command import Command
from vitsweep.results.record import Status

ASKED = ("sweep.baseline=null", "measurement.prove=none")


def test_the_latest_run_is_the_one_that_began_last(vitsweep: Command) -> None:
    assert vitsweep(*ASKED).returncode == 0
    [first] = vitsweep.store.runs()
    ahead = first.environment | {"started_at": "2999-12-31T23:59:59.999+00:00"}
    vitsweep.store.save_run(replace(first, status=Status.wrong, environment=ahead))
    again = vitsweep(*ASKED, "sweep.retry=[wrong]")
    assert again.returncode == 0, again.stdout + again.stderr
    assert vitsweep.cells()["status"].tolist() == ["measured"]
    began = {run.status: run.environment["started_at"] for run in vitsweep.store.runs()}
    assert began[Status.measured] == "3000-01-01T00:00:00.000+00:00"
