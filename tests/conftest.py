"""Fixtures and markers shared by all tests."""

import gc
import os
import random
import signal
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

# NumPy reads this when it is loaded. Its threads wait for each other in a loop: beside as many test processes
# as there are cores, fits of small matrices took 8 times longer.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Torch's OpenMP reads this when it is loaded. Threads of a rank that wait in a loop took half of the
# processor time of a run on two threads, from the test process beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The compiler starts a pool of processes that each import torch, to compile kernels beside each other.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import numpy as np
import torch

from tests.command import Command, fork_server_of_ranks
from vitsweep.execution.rank_processes import PRELOADED, start_fork_server

EXTRAS = Path(__file__).parent / "extras"
"""A folder of tests for each optional feature; files of this folder itself are of the core."""


def pytest_configure() -> None:
    gc.disable()  # until the tests are collected: nothing that is imported becomes free
    os.environ.setdefault("VITSWEEP_PREDICT", "never")  # the few tests of it ask for predictions
    torch.set_num_threads(1)  # tensors of tests are tiny: threads would only wait for each other


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let commands be interrupted, and start the fork server of ranks and commands.

    A shell that starts the tests in the background has SIGINT ignored, by all that they start. The
    server is forked with all that it and the tests import: a process of its own would import it again.
    It starts before loader workers ask for a smaller one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session.config.getoption("numprocesses", None):
        gc.enable()
        return  # this process only hands tests to the workers
    for name in (PRELOADED, "hydra", "vitsweep.report.html", "tests.preloaded"):
        import_module(name)
    fork_server_of_ranks()
    start_fork_server()  # finds it, and starts what removes semaphores of killed ranks
    gc.disable()  # what was imported had it on


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no file of an optional feature of which no test is asked for."""
    if "not extra" not in config.option.markexpr or EXTRAS not in collection_path.parents[1:]:
        return None
    has_tests = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if has_tests and "pytest.mark.smoke" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of optional features, skip what needs more GPUs than there are; slow files come first.

    Workers take whole files in this order: a long one at the end would leave the others idle.
    """
    for item in items:
        if EXTRAS in item.path.parents[1:] and not item.get_closest_marker("smoke"):
            item.add_marker("extra")
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -min(num_slow[item.path], 3))
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        wanted = (marker.kwargs.get("count", 1) if marker else 0) or 0
        if wanted > present:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} CUDA devices, found {present}")
            )


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection looks at a million objects of imports and tests otherwise: half a second
    gc.enable()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Let each test draw the same numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def vitsweep(tmp_path: Path) -> Command:
    """The command line, in an empty folder."""
    return Command(tmp_path)
