"""Which parts of a sweep folder this user wrote; of others' only values and names of the menu are used.

Commands and frozen cells carry a mark: an HMAC with a key that lies in the user's cache folder. A folder
that a colleague shared or sent has other marks or none, and is data: its free text (`spec.free_text`)
is listed, and used only with `--trust`.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import cache_folder, write_once

MARK = "mark"
"""Key of an entry that holds its mark."""

_trusted = False


def trust_folders() -> None:
    """Let this process do what folders of others name: the user has typed `--trust`."""
    global _trusted
    _trusted = True


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Context in which folders of others are trusted, where that is asked for."""
    global _trusted
    before, _trusted = _trusted, _trusted or trust
    try:
        yield
    finally:
        _trusted = before


def marked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the mark of this user; without one where no key can be kept."""
    mark = _mark(_content(entry))
    return {**entry, MARK: mark} if mark else dict(entry)


def is_own(entry: Mapping[str, Any]) -> bool:
    """Whether this user wrote an entry, and nobody has changed it since."""
    return _is_mark(entry.get(MARK), _content(entry))


def _content(entry: Mapping[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != MARK}
    return json.dumps(content, sort_keys=True, default=str)


def marked_text(text: str) -> str:
    """Return a YAML mapping whose last entry is the mark of this user, where a key can be kept."""
    mark = _mark(text)
    return f"{text}{MARK}: '{mark}'\n" if mark else text


def is_own_text(text: str) -> bool:
    """Whether this user wrote such a text, and nobody has changed it since."""
    content, _, mark = text.rpartition(f"{MARK}: ")
    return _is_mark(mark.strip("'\n"), content)


def _mark(content: str) -> str:
    key = _key(cache_folder() / "mark.key")
    return hmac.digest(key, content.encode(), hashlib.sha256).hex()[:32] if key else ""


def _is_mark(mark: object, content: str) -> bool:
    own = _mark(content)
    return bool(own) and hmac.compare_digest(str(mark).encode(), own.encode())


@cache
def _key(path: Path) -> bytes:
    with suppress(OSError):
        if not path.exists():
            write_once(path, secrets.token_hex(32))
            path.chmod(0o600)
        return path.read_bytes()
    return b""


def plain_text(text: str) -> str:
    """Return a text of somebody else for a message, whole, without letters that steer a terminal."""
    return re.sub(r"[^ -~]", "?", text)


def require_trust(where: object, named: Iterable[str]) -> None:
    """Stop where a folder that this user did not write holds text that a command would use.

    Args:
        where: the folder.
        named: the text, as `key=value`.

    Raises:
        VitsweepError: there is such a thing, and the user has not typed `--trust`.
    """
    found = [plain_text(text) for text in dict.fromkeys(named)]
    if found and not _trusted:
        lines = "\n".join(f"  - {text}" for text in found)  # whole: nobody reads what is cut off
        raise VitsweepError(
            f"`{where}` was written by somebody else (or before this user's key was lost), and holds text "
            f"that this command would call, read or write by:\n{lines}\nRead it, and type the same "
            "command with `--trust` (in Python: `trust=True`) if you want that."
        )


def digest(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the settings of a frozen cell; "" where they are none that a command freezes."""
    try:
        text = json.dumps(parts, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


# Secrets that are typed or stand in the environment, and must not get into files or jobs.

MASK = "***"
SECRET_VALUE = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # a URL with a password or a key in it
    r"|(?<=//hooks\.slack\.com/)\S+"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{12,}"
)
"""Values that are secrets whatever the variable is called."""
_SETTING = re.compile(
    r"(^|[._])(secret|password|passwd|passphrase|credentials?|bearer|(api|access|private|secret)_?key|"
    r"token|auth|dsn|pw|pwd|pat|webhook)$",
    re.I,
)


def masked_word(word: str) -> str:
    """Return a word of a command line, `key=value`, without the secret that it holds."""
    key, equals, value = word.partition("=")
    if equals and _SETTING.search(key):
        return f"{key}={MASK}"
    return SECRET_VALUE.sub(MASK, word) if value or not equals else word


def masked_setting(key: str, value: Any) -> Any:
    """Return the value of a setting, or a mask where it is a secret."""
    if not isinstance(value, str):
        return value
    return MASK if _SETTING.search(key) else SECRET_VALUE.sub(MASK, value)
