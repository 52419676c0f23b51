"""The lock of a sweep folder: flock, or a lease where the file system has none (Lustre without `-o flock`).

A lease is a file `<lock>.lease.<generation>` that its owner touches every few seconds. Whoever finds it
untouched for long, or given back, makes the next generation; exactly one can. The newest generation holds
the folder. An owner that was asleep for too long may wake up without knowing that it has lost the folder: a
writer asks `require_leases` before it publishes anything.
"""

import errno
import fcntl
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from vitsweep.errors import VitsweepError
from vitsweep.files import open_safely, parent_of, read_text, remove, write_once

NO_FLOCK = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
SECONDS_OF_LEASE, SECONDS_TO_RENEW = 120.0, 10.0
"""File systems of several nodes show a change after a minute at most (NFS)."""

GIVEN_BACK = 0
"""Time of change of a lease that nobody holds."""

_held: dict[Path, "Lease"] = {}
_told: set[Path] = set()


class LeaseLostError(VitsweepError):
    """Another command has taken over the folder of this one."""


@contextmanager
def held(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file until the block ends or the process dies.

    Args:
        lock: the file, in a sweep folder; it is made.
        on_wait: called once where another process holds it; may raise instead of waiting.
    """
    with open(open_safely(lock, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8") as handle:
        missing = _flock(handle.fileno(), on_wait)
        with _leased(lock, on_wait, missing) if missing else nullcontext():
            yield


def _flock(descriptor: int, on_wait: Callable[[], None]) -> str:
    """Lock a file; return why its file system cannot, "" where it can."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return str(error.strerror)
    return ""


def is_held(lock: Path) -> bool:
    """Whether a process of this machine or of another one holds a lock file."""
    try:
        with open(open_safely(lock, os.O_RDONLY), encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # nobody has ever held it, or this user may not read it
        lease = Lease(lock)
        newest = lease.newest()
        if error.errno not in NO_FLOCK or not newest:
            return False
        return time.time() - lease.touched_ns(newest) / 1e9 < SECONDS_OF_LEASE
    return False


def require_leases(folder: Path) -> None:
    """Stop before something is published in a folder that this process held and has lost.

    Raises:
        LeaseLostError: it has. Nothing happens where the file system has locks.
    """
    for lock, lease in list(_held.items()):
        if lock.parent == folder.absolute() and not lease.is_newest():
            raise LeaseLostError(
                f"Another command has taken over `{folder}`, because this one was silent for more than "
                f"{SECONDS_OF_LEASE:.0f} s. It writes nothing more: type the same command to go on."
            )


@contextmanager
def _leased(lock: Path, on_wait: Callable[[], None], why: str) -> Iterator[None]:
    lock = lock.absolute()
    if lock.parent not in _told:
        _told.add(lock.parent)
        print(
            f"The file system of `{lock.parent}` has no locks (flock: {why}), so a lease is used: after a "
            f"command that was killed, the next one waits {SECONDS_OF_LEASE:.0f} s. Mounted with locks "
            "(Lustre: `-o flock`; NFS: without `nolock`), it does not.",
            file=sys.stderr,
        )
    lease = Lease(lock)
    lease.take(on_wait)
    _held[lock], is_over = lease, threading.Event()
    renewal = threading.Thread(target=lease.renew_until, args=(is_over,), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        is_over.set()
        renewal.join()
        del _held[lock]
        lease.release()


class Lease:
    """The lease of a lock file, as this process sees it.

    Args:
        lock: the file.
    """

    def __init__(self, lock: Path) -> None:
        self._lock, self._generation, self._text = lock, 0, secrets.token_hex(8)

    def _path(self, generation: int) -> Path:
        return self._lock.with_name(f"{self._lock.name}.lease.{generation}")

    def newest(self) -> int:
        """Return the newest generation; 0 where there has been none."""
        found = self._lock.parent.glob(f"{self._lock.name}.lease.*")
        return max((int(p.suffix[1:]) for p in found if p.suffix[1:].isdecimal()), default=0)

    def take(self, on_wait: Callable[[], None]) -> None:
        """Make the next generation, once the newest is given back or silent; `on_wait` as in `held`."""
        is_said, seen, seen_at = False, (0, 0), time.monotonic()
        while True:
            newest = self.newest()
            if (now := (newest, self.touched_ns(newest))) != seen:
                seen, seen_at = now, time.monotonic()
            # by this machine's clock alone: those of two machines differ
            is_silent = time.monotonic() - seen_at > SECONDS_OF_LEASE
            if newest == 0 or is_silent or now[1] == GIVEN_BACK:
                if self._make(newest + 1):
                    return
                continue
            if not is_said:
                on_wait()
            is_said = True
            time.sleep(min(1.0, SECONDS_OF_LEASE / 10))

    def _make(self, generation: int) -> bool:
        if not write_once(self._path(generation), self._text):
            return False
        self._generation = generation
        if not self.is_newest():  # others were faster, by more than one generation
            remove(self._path(generation))
            return False
        for older in range(max(1, generation - 3), generation):
            remove(self._path(older))
        return True

    def touched_ns(self, generation: int) -> int:
        """Return when the owner of a generation last touched it, or `GIVEN_BACK`; -1 where nobody can say."""
        with suppress(OSError):
            return self._path(generation).lstat().st_mtime_ns
        return -1

    def is_newest(self) -> bool:
        """Whether this process still holds the lock."""
        try:
            own = read_text(self._path(self._generation))
        except (OSError, ValueError):
            return False
        return own == self._text and self.newest() == self._generation

    def renew_until(self, is_over: threading.Event) -> None:
        """In a thread: touch the file until the lock is given back, or lost."""
        while not is_over.wait(min(SECONDS_TO_RENEW, SECONDS_OF_LEASE / 10)):
            self._touch()

    def release(self) -> None:
        """Give the lock back; its generation stays, so that none is ever used twice."""
        if self.is_newest():
            self._touch((GIVEN_BACK, GIVEN_BACK))

    def _touch(self, times: tuple[int, int] | None = None) -> None:
        with suppress(OSError, VitsweepError), parent_of(self._path(self._generation)) as place:
            os.utime(place[1], times, dir_fd=place[0], follow_symlinks=False)
