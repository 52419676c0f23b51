"""How memory of a rank is allocated: another malloc, settings of torch's CUDA allocator, huge pages."""

import os
import sys
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitsweep.spec.technique import Runtime, not_started_so

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}
PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}
"""Allocator -> its Debian package."""
JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
"""PyTorch's performance tuning guide: freed memory is kept for the next step."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, kw_only=True)
class HostAllocator(Runtime):
    """Another malloc than that of the C library for all memory of the host, by LD_PRELOAD.

    On CPU ranks it holds the tensors; on GPU ranks batches and what Python needs.

    Attributes:
        library: `jemalloc` or `tcmalloc` (gperftools).
    """

    library: Literal["jemalloc", "tcmalloc"]

    def lacking_here(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the library is missing."""
        if find_allocator(self.library) is None:
            yield (
                f"`runtime={self.name}` needs the library {self.library}, which this machine lacks: "
                f"install it (Debian: `apt-get install {PACKAGES[self.library]}`), or use "
                "`runtime=plain`."
            )

    def environment(self) -> Mapping[str, str]:
        """Load the library before all others."""
        path = find_allocator(self.library)
        if path is None:
            return {}
        others = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p != path]
        variables = {"LD_PRELOAD": ":".join([path, *others])}
        return variables | ({"MALLOC_CONF": JEMALLOC} if self.library == "jemalloc" else {})

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Refuse a process that does not run with it.

        Raises:
            VitsweepError: the library is missing, or the process was started without it.
        """
        super().set_up(cell, local_rank)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        if self.library not in maps:
            raise not_started_so(
                f"runtime={self.name}", self.environment() or {"LD_PRELOAD": self.library}
            )


@cache
def find_allocator(library: str) -> str | None:
    """Return what LD_PRELOAD takes for a library of this machine or of this Python, or None."""
    for name in LIBRARIES[library]:
        beside = sorted(Path(sys.prefix, "lib").glob(f"lib{name}.so*"))  # conda's
        found = str(beside[0]) if beside else find_library(name)
        if found:
            return found
    return None


@dataclass(frozen=True, kw_only=True)
class CudaAllocator(Runtime):
    """Settings of torch's allocator of GPU memory.

    Attributes:
        settings: as in PYTORCH_CUDA_ALLOC_CONF. `expandable_segments:True` maps memory page by page, so
            that less of it is lost between tensors.
    """

    settings: str

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse CPU."""
        if cell.resources.device == "cpu":
            yield (
                f"`runtime={self.name}` sets the allocator of GPU memory, and this cell has "
                "`resources.device=cpu`: use `runtime=jemalloc`, or `runtime=plain`."
            )

    def environment(self) -> Mapping[str, str]:
        """torch reads it at the first allocation."""
        return {"PYTORCH_CUDA_ALLOC_CONF": self.settings}

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Refuse a process that was started with other settings.

        Raises:
            VitsweepError: it was.
        """
        super().set_up(cell, local_rank)
        if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != self.settings:
            raise not_started_so(f"runtime={self.name}", self.environment())


@dataclass(frozen=True, kw_only=True)
class HugePages(Runtime):
    """Large CPU tensors lie in transparent huge pages (2 MiB), which need fewer entries of the TLB.

    torch asks the kernel for them with `madvise` where THP_MEM_ALLOC_ENABLE=1 (c10/core/impl/alloc_cpu).
    """

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse GPUs."""
        if cell.resources.device == "cuda":
            yield (
                f"`runtime={self.name}` is for tensors in host memory, and this cell has "
                "`resources.device=cuda`: use `runtime=expandable_segments`, or `runtime=plain`."
            )

    def lacking_here(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the kernel gives none."""
        if huge_pages_of_kernel() in ("never", ""):
            yield (
                f"`runtime={self.name}` needs transparent huge pages, and {HUGE_PAGES} of this machine "
                "says never: `echo madvise` into it as root, or use `runtime=plain`."
            )

    def environment(self) -> Mapping[str, str]:
        """torch reads it at the first allocation."""
        return {"THP_MEM_ALLOC_ENABLE": "1"}

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Refuse a process that was started without.

        Raises:
            VitsweepError: it was.
        """
        super().set_up(cell, local_rank)
        if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
            raise not_started_so(f"runtime={self.name}", self.environment())


def huge_pages_of_kernel(path: Path = HUGE_PAGES) -> str:
    """Return `always`, `madvise` or `never`; "" where the kernel has no huge pages."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
