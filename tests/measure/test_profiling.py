"""The profiler that measurements use."""

import subprocess
import sys

PROFILED = """
import torch
from torch.profiler import ProfilerActivity
from vitsweep.measure.communication import quiet_profile

with quiet_profile([ProfilerActivity.CPU]) as profiled:
    torch.ones(3).sum()
assert profiled.events()
"""


def test_it_records_and_prints_nothing() -> None:
    """In a process of its own: Kineto reads its log level once."""
    done = subprocess.run(
        [sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
