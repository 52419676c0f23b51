"""What an interrupted run leaves for its next attempt, however its ranks end."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cells import cell
from vitsweep.execution.rank_processes import (
    EXIT_SAVED,
    STOP_SIGNAL,
    LocalRanks,
    Ranks,
    fork_server,
)
from vitsweep.execution.run_request import RunRequest
from vitsweep.execution.supervisor import RunEnding, supervise
from vitsweep.results.store import Store, read_lines
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.checkpoint_files import (
    CHECKPOINT_FOLDER,
    INFO_FILE,
    CheckpointInfo,
    write_info,
)

pytestmark = pytest.mark.slow

STEP = 7


def saves_and_fails_on_rank_1(folder: Path, saves: bool, rank: int, local_rank: int) -> None:
    """Wait for the stop; rank 0 leaves a whole checkpoint, rank 1 fails while it leaves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    (folder / f"ready-{rank}").touch()
    signal.sigwait({STOP_SIGNAL})
    if saves and rank == 0:
        info = CheckpointInfo(step=STEP, seconds=1.0, world_size=2, mesh={}, scaler={}, groups=[])
        write_info(folder, info)
    while saves and not (folder / INFO_FILE).exists():  # as the barrier after saving
        time.sleep(0.01)
    os._exit(EXIT_SAVED if rank == 0 else 1)


@pytest.mark.parametrize("saves", [True, False])
def test_a_whole_checkpoint_counts_although_a_rank_fails_while_it_leaves(
    tmp_path: Path, saves: bool
) -> None:
    store = Store(tmp_path)
    request = RunRequest(
        sweep_folder=store.root,
        cell_id="c",
        run_id="b-1",
        block="b",
        position=0,
        init_method="file://unused",
    )
    checkpoint = request.folder / CHECKPOINT_FOLDER
    checkpoint.mkdir(parents=True)

    def start(request: RunRequest, cell: CellSpec) -> Ranks:
        arguments = (checkpoint, saves)
        ranks = range(cell.resources.world_size)
        return LocalRanks(
            fork_server(), saves_and_fails_on_rank_1, arguments, ranks, request.folder
        )

    def stop() -> None:
        if len(list(checkpoint.glob("ready-*"))) == 2:
            raise RunEnding("The command was interrupted.", 60.0)

    with pytest.raises(RunEnding) as ending:
        supervise(request, cell("task=train", "sharding=fsdp"), start, stop)

    expected = STEP if saves else None
    assert ending.value.saved_step == expected
    end = list(read_lines(store.cell("c") / "attempts.jsonl"))[-1]
    assert (end["event"], end["saved_step"]) == ("end", expected)
    assert not list(store.runs())
