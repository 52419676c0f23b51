"""Files that save work between commands, in the user's cache folder: losing one costs time alone."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


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
