"""Failure files: exceptions of a rank become a status and one sentence."""

import errno
from pathlib import Path

import pytest

from vitsweep.cell import DivergedError
from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import classify, read_failure, write_failure
from vitsweep.proof.faults import WrongResultError

NCCL = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)

DDP = (
    "Expected to have finished. Enable detection, and by \nmaking sure all outputs count. \n"
    "If you already have done the above, report this."
)


def test_an_exception_becomes_a_status_and_a_sentence() -> None:
    for error, status, reason in [
        (MemoryError(), "out_of_memory", "MemoryError"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore"),
            "out_of_memory",
            "can't",
        ),
        (DivergedError("The loss became inf."), "diverged", "The loss became inf."),
        (WrongResultError("differs\nby 2"), "wrong", "differs\nby 2"),
        (VitsweepError("a sentence"), "failed", "a sentence"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "killed",
            "could not read or write its files",
        ),
        (
            OSError(errno.ESTALE, "Stale file handle", "/data/x"),
            "killed",
            "Stale file handle (`/data/x`).",
        ),
        (KeyError("a"), "failed", "KeyError: 'a'"),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "out_of_memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            "out_of_memory",
            "CUDNN_STATUS_ALLOC_FAILED",
        ),
        (
            RuntimeError(NCCL + "Failed to CUDA calloc async 608 bytes"),
            "out_of_memory",
            "608 bytes",
        ),
        (RuntimeError(NCCL + "Cuda failure 2 'out of memory'"), "out_of_memory", "Cuda failure 2"),
        (RuntimeError(NCCL + "Cuda failure 700 'illegal memory access'"), "failed", "illegal"),
        (
            RuntimeError(DDP),
            "failed",
            "RuntimeError: Expected to have finished. Enable detection, and by making sure all outputs count",
        ),
        (
            RuntimeError("CUDA error: assert triggered\nCUDA kernel errors"),
            "failed",
            "RuntimeError: CUDA error: assert triggered",
        ),
        (RuntimeError("could not create a primitive"), "failed", "RuntimeError: could not create"),
    ]:
        found, text = classify(error)
        assert found == status
        assert reason in text
        assert "already have done" not in text


def test_a_failure_is_read_back_and_a_missing_or_damaged_one_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_failure(tmp_path, 3, KeyError("a"))
    found = read_failure(tmp_path, 3)
    assert found is not None
    assert (found["rank"], found["status"], found["reason"]) == (3, "failed", "KeyError: 'a'")
    assert found["peak"]["peak_rss_gib"] > 0
    assert "KeyError" in found["traceback"]
    assert "KeyError" in capsys.readouterr().err, "the log of the rank has it too"
    assert read_failure(tmp_path, 0) is None
    (tmp_path / "failure-0.json").write_text("{half")
    assert read_failure(tmp_path, 0) is None
