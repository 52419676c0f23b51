"""What a sweep folder's files look like from outside: names, versions, sizes, and entries of a list."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from vitsweep.files import fits


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what is there twice, twice: no reader follows aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def yaml_text(document: dict[str, Any]) -> str:
    """Return a document as YAML that `foreign` reads."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return text


_NOTHING = type(None)
_COMMAND: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("command", "time"), (str,)),
    **dict.fromkeys(("question", "search", "replicate"), (str, _NOTHING)),
    **dict.fromkeys(("metrics", "limit", "baselines"), (dict, _NOTHING)),
    **dict.fromkeys(("cells", "published", "hydra"), (list,)),
}


def is_command(entry: dict[str, Any]) -> bool:
    """Whether a line of `commands.jsonl` has the entries that a command writes."""
    if not fits(entry, _COMMAND, ()):
        return False
    ids = (*entry.get("cells", ()), *(entry.get("baselines") or {}).values())
    return all(isinstance(cell_id, str | None) for cell_id in ids)


def size_of(value: Any) -> int:
    """Return the characters of a text, or the entries and characters of all that a section holds."""
    if type(value) is str:
        return len(value)
    if type(value) not in (dict, list):
        return 0
    return len(value) + sum(map(size_of, value.values() if type(value) is dict else value))


def text_of(path: str) -> str:
    """Read a run record in a folder that is known to be no link; many are read one after the other."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), encoding="utf-8", newline="") as handle:
        return handle.read()


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder, in order; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def version_of(path: Path) -> tuple[int, ...]:
    """Return what tells whether a plain file has changed; () where there is none."""
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns, found.st_ino
    return ()
