"""The head reads a class token."""

from dataclasses import dataclass
from typing import Literal

from vitsweep.spec.technique import Classifier


@dataclass(frozen=True, kw_only=True)
class Token(Classifier):
    """A learned token goes through all blocks and is read at the end (arXiv:2010.11929, eq. 4).

    One token more than there are patches: 197 at 224 px and patch 16, an odd number.
    """

    pooling: Literal["token"]
