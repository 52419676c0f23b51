"""Files that survive crashes, full disks and several writers: whole files, and JSON lines."""

import contextlib
import errno
import filecmp
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write to a temporary name, flush to disk, rename: a crash leaves the old file or the new one.

    Args:
        path: of the file; its folder is made.
        text: its new content.
        durable: wait until the disk has it; False for what the same command would write again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as handle:
        handle.write(text)
        if durable:
            handle.flush()
            os.fsync(handle.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name that becomes `path` at the end; after an exception it is removed.

    A file that has the same content already is left alone, with its time of change.
    """
    draft = draft_of(path)
    try:
        yield draft
        if path.exists() and filecmp.cmp(draft, path, shallow=False):
            draft.unlink()
        else:
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_if_changed(path: Path, text: str, *, durable: bool = True) -> bool:
    """Write atomically unless the file has this text already; return whether it was written."""
    try:
        if path.read_text(encoding="utf-8") == text:
            return False
    except (OSError, UnicodeDecodeError):
        pass
    write_atomically(path, text, durable=durable)
    return True


def draft_of(path: Path) -> Path:
    """Return a hidden name beside a file that no other call uses, in any process, thread or host."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")


def write_once(path: Path, text: str) -> bool:
    """Write atomically unless the file exists; False if it does. One of several writers wins."""
    draft = draft_of(path)
    write_atomically(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP) or path.exists():
            raise
        draft.replace(path)  # a file system without hard links: as good as it gets there
    finally:
        draft.unlink(missing_ok=True)
    return True


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of two writers never mix.

    A line that a crash or a full disk cut in half is closed first: it must not swallow this one.
    Another writer's line seen before its end looks the same; then an empty line is left behind it.

    Raises:
        OSError: the line could not be written, or not the whole of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = ("\n" * cut + json.dumps(entry) + "\n").encode()
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; lines cut in half and other damage are left out."""
    return parsed_lines(path.read_bytes()) if path.exists() else []


def parsed_lines(text: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a text with one per line, without the lines that hold none."""
    entries = []
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):  # also where it is no UTF-8
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]


# Files that save work between commands, in the user's cache folder: losing one costs time alone.


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/vitsweep`, or `~/.cache/vitsweep`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitsweep"


def write_cache_file(path: Path, content: bytes) -> None:
    """Write under another name and rename, so that any number of processes may do so at once.

    Where nothing can be written nothing is kept.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(draft, path)
        except OSError:
            Path(draft).unlink(missing_ok=True)
