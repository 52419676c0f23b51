"""A fault of one rank ends its own run with a status and a reason, and no other cell's run."""

import re

import pandas as pd
import pytest

from tests.command import Command, fault

FAULTS = {
    "raises": (fault("Raise"), "failed", "KeyError: 'a bug in a technique'"),
    "is killed": (fault("Kill"), "killed", "Rank 1 was ended by SIGKILL"),
    "leaves": (fault("Leave"), "failed", "Rank 1 left with exit code 9"),
    "fills the disk": (
        fault("NoSpace"),
        "killed",
        "could not read or write its files: No space left",
    ),
    "hangs": (
        [*fault("Hang"), "measurement.timeout_min=0.05"],
        "timed_out",
        "measurement.timeout_min=0.05",
    ),
    "eats memory": (
        ["resources.memory_gib_per_rank=0.05", "data=synthetic", "data.native_resolution_px=256"],
        "out_of_memory",
        "allocate",
    ),
    "holds fewer tokens than the others": (
        ["sequence_parallel=ulysses", *fault("Shorter")],
        "failed",
        "has 8 positions on rank 1; 17 positions over 2 ranks are 9 on each, padding included.",
    ),
    "computes something else": (
        ["memory._target_=tests.faults.Scaled", "measurement.prove=twin"],
        "wrong",
        "nano twin",
    ),
    "explodes": (
        ["memory._target_=tests.faults.Exploding"],
        "diverged",
        "inf or NaN",
    ),
    "is refused": (["sharding=hsdp"], "invalid", "at least 2 replicas"),
    "lacks memory under the instruments": (fault("LateOutOfMemory"), "measured", ""),
    "is well": (["optimizer=adamw_foreach"], "measured", ""),
}
"""What happens to a cell: overrides, and the status and reason of its row."""


METRICS = {"calls": "times_called", "mine": "ends_its_process"}


@pytest.mark.slow
def test_whatever_happens_to_a_cell_is_its_own_row_with_the_reason(vitsweep: Command) -> None:
    """One sweep whose cells meet all faults, beside one that is well, with two metrics of a user's."""
    cells = ",".join(f"""['{"','".join(texts)}']""" for texts, _, _ in FAULTS.values())
    metrics = [
        f"++metric.columns.{name}={{function:tests.faults.{function},unit:n,label:{name},better:null}}"
        for name, function in METRICS.items()
    ]
    done = vitsweep("-m", f"sweep.cells=[{cells}]", *metrics)
    assert done.returncode == 3, done.stderr
    for name, (overrides, status, reason) in FAULTS.items():
        row = row_of(vitsweep, overrides)
        assert row["status"] == status
        assert reason in (row["reason"] or "")
        if name in ("raises", "is killed", "leaves", "holds fewer tokens than the others"):
            assert row["failed_rank"] == 1
        assert (row.isna()["images_per_second"]) == (status != "measured")
        if status == "measured":
            assert row["calls"] == 1, "a metric of the user's is computed once for a run"
    why = r"tests\.faults\.ends_its_process raised SystemExit: 3\."
    said = rf"The metric `mine` has no value in (\d) of \1 runs: {why}"
    assert len(re.findall(said, done.stdout)) == 1

    assert row_of(vitsweep, FAULTS["eats memory"][0])["peak_rss_gib"] > 0.05

    row = row_of(vitsweep, FAULTS["lacks memory under the instruments"][0])
    assert row["images_per_second"] > 0, "what was timed stays"
    assert row["peak_rss_gib"] > 0.05
    assert row.isna()[["forward_ms", "parameter_gib", "gradient_bytes_per_step"]].all()
    (run,) = vitsweep.store.runs(row.name)
    assert "4.00 GiB" in run.environment["instruments_reason"]


def row_of(vitsweep: Command, overrides: list[str]) -> "pd.Series":
    """The row of the cell that was asked for with these overrides."""
    store = vitsweep.store
    (cell_id,) = [
        folder.name
        for folder in store.cells.iterdir()
        if set(overrides) <= set(store.frozen(folder.name)["overrides"])
    ]
    return vitsweep.cells().set_index("cell_id").loc[cell_id]
