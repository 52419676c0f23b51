"""The fenced blocks of README and docs/, with what their pages say about running them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.extras import ABSENT_PAGES

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in ABSENT_PAGES
)
NOT_RUN, RUN_IN = "not run", "run in"

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[\w ]+): (?P<text>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
_PATH = re.compile(r"# (?P<path>[\w./]+/[\w.]+\.(?:py|yaml))$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its file.
        language: after the fence, such as `bash`.
        text: what stands between the fences.
        mark: what the comment line before the fence says: `not run`, `run in`, or nothing.
        said: the rest of that comment: the reason, or the folder.
    """

    page: Path
    language: str
    text: str
    mark: str
    said: str

    @property
    def file(self) -> str:
        """The path of a block that is a file: its first line is a comment with that path."""
        named = _PATH.match(self.text.partition("\n")[0])
        return named["path"] if named else ""

    @property
    def commands(self) -> list[str]:
        """The lines to be typed, continued lines joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def written(page: Path) -> str:
    """Return what people wrote of a page, without the tables that are made from the code."""
    return _GENERATED.sub("", page.read_text(encoding="utf-8"))


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks of all pages in some languages, README first."""
    for page in PAGES:
        for found in _BLOCK.finditer(written(page)):
            if found["language"] in languages:
                mark, said = found["mark"] or "", found["text"] or ""
                yield Block(page, found["language"], found["body"], mark, said)
