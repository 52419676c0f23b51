"""What the classification head reads: the class token, or the mean over all tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Classifier

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Token(Classifier):
    """A learned token goes through all blocks and is read at the end (arXiv:2010.11929, eq. 4).

    One token more than there are patches: 197 at 224 px and patch 16, an odd number.
    """

    pooling: Literal["token"]


@dataclass(frozen=True, kw_only=True)
class Pooled(Classifier):
    """Average over all patches instead of a class token (pycls `VIT.CLASSIFIER_TYPE: pooled`).

    Saves the class token, and leaves a number of tokens that kernels like: 196 at 224 px and patch
    16, 256 at 256 px. Another model, so that its losses differ from those of the class token.
    """

    pooling: Literal["mean"]

    changes_model: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a model whose head reads every token anyway."""
        if not cell.model.has_class_token("token"):
            yield (
                f"`classifier={self.name}` changes nothing with `model={cell.model.name}`, whose "
                "head reads the mean over all tokens anyway. Use `classifier=token`."
            )
