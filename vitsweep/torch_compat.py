"""Which versions of torch and torchao go together, without importing either.

`benchmarks/torch_versions.sh` runs each; `docs/torch_versions.md` has what it found.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

NEWEST = "2.15"
"""The newest version that was tried; pyproject.toml names the oldest."""


def minor(text: str) -> tuple[int, int]:
    """Return (2, 9) of `2.9.1+cpu`."""
    major, second, *_ = text.split("+")[0].split(".")
    return int(major), int("".join(digit for digit in second if digit.isdigit()))


def is_older_than(needed: str) -> bool:
    """Tell whether the installed torch is of an earlier minor version."""
    return minor(version("torch")) < minor(needed)


def is_untried() -> bool:
    """Tell whether the installed torch is newer than all that were tried."""
    return minor(version("torch")) > minor(NEWEST)


def torchao_refusal(
    typed: str, extra: str, otherwise: str, oldest: tuple[int, int] = (0, 0)
) -> Iterator[str]:
    """Say why what was typed, such as `precision=fp8`, cannot have torchao."""
    try:
        found = version("torchao")
    except PackageNotFoundError:
        yield f"`{typed}` needs torchao: `pip install 'vitsweep[{extra}]'`, or use `{otherwise}`."
        return
    if minor(found) < oldest:
        needed = ".".join(map(str, oldest))
        yield (
            f"`{typed}` needs torchao {needed} or newer, and this is {found}: "
            f"`pip install 'torchao>={needed}'`, or use `{otherwise}`."
        )
    if minor(found) >= (0, 18) and is_older_than("2.10"):
        yield (
            f"`{typed}` needs torchao, of which {found} needs torch 2.10 or newer, and this is torch "
            f"{version('torch')}: `pip install 'torchao<0.18'`, or use `{otherwise}`."
        )
