"""The peak of resident memory sees what was held, also when it is gone."""

from pathlib import Path

import pytest
import torch

from vitsweep.measure.memory import GIB, peak_memory, reset_peak

CPU = torch.device("cpu")
MIB = 2**20


def peak_mib() -> float:
    found = peak_memory(CPU)["peak_rss_gib"]
    assert found is not None
    return found * GIB / MIB


def can_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def test_on_a_cpu_the_peak_is_that_of_the_process() -> None:
    columns = peak_memory(CPU)
    assert columns["peak_allocated_gib"] is None
    assert 10 < peak_mib() < 64 * 1024


@pytest.mark.skipif(not can_reset(), reason="this kernel does not let a process reset its peak")
def test_the_peak_grows_by_what_was_held_and_a_reset_forgets_it() -> None:
    reset_peak(CPU)
    before = peak_mib()
    held = torch.ones(128 * MIB // 4)
    grown = peak_mib() - before
    del held
    assert grown == pytest.approx(128, abs=16)
    assert peak_mib() - before == pytest.approx(grown, abs=1)
    reset_peak(CPU)
    assert peak_mib() - before < 32
