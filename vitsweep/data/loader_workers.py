"""Processes that read ahead, started so that they can neither hang nor outlive their rank.

Workers come from a fork server of the rank's own: a process forked from the rank itself would copy
the locks of threads that it does not have (OpenMP after the first parallel operation, gloo, NCCL),
and hang in the first of them that was held. The server has imported torch once, so that a worker
starts in some milliseconds.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver
from typing import Any

START_METHOD = "forkserver"


def start_fork_server() -> None:
    """Let the server import torch while the rank builds its model."""
    forkserver.set_forkserver_preload(["torch", "vitsweep.data.image_reader"])
    forkserver.ensure_running()


def begin_worker(worker: int) -> None:
    """Set up a worker: it ignores Ctrl-C, which the rank handles, and ends when the rank ends.

    A worker is a child of the server, so that torch's own watch over the parent's process id never
    sees the rank die.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def as_read(batch: Any) -> Any:
    """Collate nothing: the reader returns whole batches."""
    return batch
