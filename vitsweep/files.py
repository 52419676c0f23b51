"""Files that survive crashes, full disks, several writers and the links of a foreign sweep folder.

Below a folder given to `guard`, every folder is opened relative to the one that holds it and never
through a link, so that a copied or shared sweep cannot make a command read or write outside of it.
"""

import errno
import json
import multiprocessing.util
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from vitsweep.errors import VitsweepError

MOST_BYTES = 2**30
"""A larger file is damaged, or made to fill the memory of whoever reads it."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""What an id of a cell or run looks like: the name of a file, never a path or an option."""

_guarded: set[str] = set()


class UnsafeFileError(VitsweepError, OSError):
    """A file of a sweep is a link, not a regular file or too large; it is neither followed nor read."""


class SweepGoneError(VitsweepError, FileNotFoundError):
    """A sweep folder was renamed or removed while a process used it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"`{folder}` is gone: it was renamed or removed while a command or a job used it. What was "
            "measured is where the folder is now. Rename it back and type the same command to go on."
        )


def guard(folder: Path) -> None:
    """From now on this process follows no link below a folder; the folder itself may be one."""
    _guarded.add(os.path.abspath(folder))


@contextmanager
def parent_of(path: Path, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that holds `path`, and the name of `path` in it.

    Args:
        path: a file or folder.
        make: make the folders that are missing, but for a guarded one: `Store.create` makes it once.

    Raises:
        UnsafeFileError: a folder in between is a link.
        SweepGoneError: the guarded folder is not there.
        OSError: there is no such folder, or it cannot be made.
    """
    absolute = Path(os.path.abspath(path))
    guarded = [p for p in absolute.parents if str(p) in _guarded]
    top = guarded[-1] if guarded else absolute.parent
    if make and not guarded:
        top.mkdir(parents=True, exist_ok=True)
    if guarded and not top.is_dir():
        raise SweepGoneError(top)
    descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in absolute.relative_to(top).parts[:-1]:
            inner = _entered(descriptor, folder, path, make=make)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, absolute.name
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the whole path, where it names a part of it or nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not os.path.isabs(error.filename or ""):
            error.filename, error.filename2 = str(path), None
        raise


def _entered(parent: int, name: str, path: Path, *, make: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with _naming(path):
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
        try:
            return os.open(name, flags, dir_fd=parent)
        except OSError:
            _refuse_link(parent, name, path, stat.S_ISDIR)
            raise


def _refuse_link(parent: int, name: str, path: Path, *allowed: Callable[[int], bool]) -> None:
    with suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise UnsafeFileError(_link(name, path))
        if not any(kind(mode) for kind in (stat.S_ISREG, *allowed)):  # root could replace /dev/null
            raise UnsafeFileError(f"`{path}` is not a regular file: copy or remove it.")


def _link(name: str, path: Path) -> str:
    return (
        f"`{name}` in `{path}` is a link, and links inside a sweep folder are not followed: replace it "
        "by a copy of what it points to, or remove it."
    )


def open_safely(path: Path, flags: int) -> int:
    """Open a regular file, which is no link, and return its descriptor; its folder is made for O_CREAT.

    Raises:
        UnsafeFileError: it is a link, a pipe or a device, or would be changed under two names.
        OSError: it cannot be opened.
    """
    with parent_of(path, make=bool(flags & os.O_CREAT)) as (folder, name), _naming(path):
        always = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
        try:
            descriptor = os.open(name, flags | always, 0o666, dir_fd=folder)
        except OSError:
            _refuse_link(folder, name, path)
            raise
    found = os.fstat(descriptor)
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    if not stat.S_ISREG(found.st_mode) or (is_written and found.st_nlink > 1):
        os.close(descriptor)
        what = "has a second name (a hard link)" if found.st_nlink > 1 else "is not a regular file"
        raise UnsafeFileError(f"`{path}` {what}: replace it by a copy, or remove it.")
    return descriptor


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: of the file.
        most: bytes that a file of its kind may have.

    Raises:
        UnsafeFileError: it is a link, not a regular file, or larger.
        OSError: it cannot be read.
    """
    with open(open_safely(path, os.O_RDONLY), "rb") as handle, _naming(path):
        if (size := os.fstat(handle.fileno()).st_size) > most:
            raise UnsafeFileError(
                f"`{path}` has {size} bytes and is too large for a file of its kind, which has at most "
                f"{most}: remove or restore it."
            )
        return handle.read()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file (see `read_bytes`); UnicodeDecodeError where it is no UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def make_folder(path: Path) -> Path:
    """Make a folder and those that hold it; return it.

    Raises:
        UnsafeFileError: one of them is a link.
    """
    with parent_of(path / "file", make=True):
        return path


def refuse_links(folder: Path) -> None:
    """Refuse a folder that holds a link, before a library writes files there under names of its own.

    Raises:
        UnsafeFileError: it holds one.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise UnsafeFileError(_link(entry.name, folder))


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds, if there is one; links are removed themselves."""
    with suppress(FileNotFoundError), parent_of(path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def remove_empty(path: Path) -> None:
    """Remove a folder that holds nothing; any other one stays."""
    with suppress(OSError), parent_of(path) as (folder, name):
        os.rmdir(name, dir_fd=folder)


def write_atomically(path: Path, text: str | bytes, *, durable: bool = False) -> None:
    """Write to a temporary name and rename: a process that is killed leaves the old file or the new one.

    Args:
        path: of the file; its folder is made.
        text: its new content.
        durable: wait until the disk has the file and its name, so that a power cut leaves one of the two
            as well; not needed for what can be made again.
    """
    with replacing(path) as handle:
        handle.write(text.encode() if isinstance(text, str) else text)
        if durable:
            handle.flush()
            os.fsync(handle.fileno())
    if durable:
        make_durable(path)


NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems say that cannot wait for the names in a folder."""


def sync_folder(descriptor: int) -> None:
    """Wait until the disk has the names in a folder, where its file system can do that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SYNCED:
            raise


def make_durable(path: Path) -> None:
    """Wait until the disk has a file, its name, and those of the folders around it below a guarded one.

    Raises:
        OSError: there is no such file, or the disk fails.
    """
    descriptor = open_safely(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    absolute = Path(os.path.abspath(path))
    places = [absolute, *absolute.parents]
    guarded = [n for n, place in enumerate(places) if str(place) in _guarded]
    for place in places[: max(guarded, default=1)]:
        with parent_of(place) as (folder, _), _naming(place):
            sync_folder(folder)


@contextmanager
def _draft(folder: int, path: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Yield a new hidden file next to `path`, and its name; it is removed if it is left there."""
    draft = f".{path.name}.{secrets.token_hex(8)}.draft"
    with _naming(path), open(_made(folder, draft, os.O_WRONLY), "wb") as handle:
        try:
            yield handle, draft
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)


def _made(folder: int, name: str, flags: int) -> int:
    """Make a file that is not there yet, and return its descriptor."""
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path` at the end; after an exception it is removed."""
    with parent_of(path, make=True) as (folder, name), _draft(folder, path) as (handle, draft):
        _refuse_link(folder, name, path)
        yield handle
        handle.flush()
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


SECONDS_OF_CLAIM = 60.0
"""The owner of a claim that stands longer has died: it makes two calls of the system meanwhile."""


def write_once(path: Path, text: str) -> bool:
    """Write durably unless the file exists; False if it does. One of several writers wins.

    Who makes `.NAME.claim` may rename its draft. Neither hard links nor locks are needed, which some file
    systems lack.
    """
    with parent_of(path, make=True) as (folder, name), _draft(folder, path) as (handle, draft):
        handle.write(text.encode())
        handle.flush()
        os.fsync(handle.fileno())
        claim = f".{name}.claim"
        if not _claimed(claim, name, folder):
            return False
        try:
            if is_new := not _is_there(name, folder):
                os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(claim, dir_fd=folder)
        sync_folder(folder)
        return is_new


def _claimed(claim: str, name: str, folder: int) -> bool:
    """Make a file that another writer may have made, and will remove; False where `name` is there."""
    seen, since = 0, time.monotonic()
    while not _is_there(name, folder):
        try:
            os.close(_made(folder, claim, os.O_WRONLY))
            return True
        except FileExistsError:
            with suppress(FileNotFoundError):
                found = os.stat(claim, dir_fd=folder, follow_symlinks=False).st_ctime_ns
                if found != seen:
                    seen, since = found, time.monotonic()
                elif time.monotonic() - since > SECONDS_OF_CLAIM:
                    os.unlink(claim, dir_fd=folder)
            time.sleep(0.01)
    return False


def _is_there(name: str, folder: int) -> bool:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        return True
    return False


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of two writers never mix.

    A line that a crash or a full disk cut in half is closed first: it must not swallow this one.
    Another writer's line seen before its end looks the same; then an empty line is left behind it.

    Raises:
        OSError: the line could not be written, or not the whole of it.
    """
    descriptor = open_safely(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        with _naming(path):
            size = os.fstat(descriptor).st_size
            cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            line = ("\n" * cut + json.dumps(entry) + "\n").encode()
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def fits(
    entry: dict[str, Any], kinds: Mapping[str, tuple[type, ...]], needed: Iterable[str]
) -> bool:
    """Whether the values of an entry are of the types that its readers compute with.

    Args:
        entry: a JSON object of a file that somebody else may have written.
        kinds: key -> types of its value, where it is there.
        needed: keys that must be there.
    """
    return all(key in entry for key in needed) and all(
        type(entry[key]) in kind for key, kind in kinds.items() if key in entry
    )


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder, in order; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def version_of(path: str | Path) -> tuple[int, ...]:
    """Return what tells whether a regular file has changed; () where there is none."""
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns, found.st_ino
    return ()


# Files that save work between commands, in the user's cache folder: losing one costs time alone.


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/vitsweep`, or `~/.cache/vitsweep`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "vitsweep"


def home_folder() -> Path:
    """Return the user's home; where there is none, as in a container, one in which nothing can be kept."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def write_cache_file(path: Path, content: bytes) -> None:
    """Write under another name and rename, so that any number of processes may do so at once.

    Where nothing can be written nothing is kept.
    """
    with suppress(OSError):
        write_atomically(path, content)


# Sockets of the processes of one machine. The path of a socket has at most 107 characters.


LONGEST_FOLDER = 75
"""Characters that leave room for the names which multiprocessing gives to a socket and its folder."""


def make_socket_folder() -> Path:
    """Make the private folder in which this process, and those that it starts, keep their sockets.

    It lies in the temporary folder, or in `/tmp` where that has too long a path. multiprocessing removes
    it when this process exits. `TMPDIR` stays as it is.
    """
    usual = tempfile.gettempdir()
    tempfile.tempdir = usual if len(usual) <= LONGEST_FOLDER else "/tmp"
    try:
        folder = multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
    if multiprocessing.parent_process() is None:
        _make_at_exit(folder)
    return Path(folder)


@cache
def _make_at_exit(folder: str) -> None:
    """Make a folder that a cleaner has removed meanwhile: multiprocessing fails to remove what is gone."""
    # of a higher priority than that removal, whose is -100
    multiprocessing.util.Finalize(None, os.makedirs, (folder,), {"exist_ok": True}, -50)
