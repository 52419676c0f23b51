"""Order of the axes in which the blocks work."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitsweep.spec.technique import Layout

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


class _OfAxes(Layout):
    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse settings of convolutions that the cell has none of."""
        if self.patch_embedding == "linear" and not cell.model.linear_patches:
            yield (
                "`layout.patch_embedding=linear` is for the patches of a `vit_*`, and "
                f"`model={cell.model.name}` has an embedding of its own: use "
                "`layout.patch_embedding=convolution`."
            )
        if self.cudnn_benchmark and cell.resources.device == "cpu":
            yield (
                "`layout.cudnn_benchmark=true` lets cuDNN choose among its convolutions, and has no effect "
                "with `resources.device=cpu`: use `layout.cudnn_benchmark=false`."
            )


@dataclass(frozen=True, kw_only=True)
class BatchFirst(_OfAxes):
    """Images are the outermost axis, tokens of one image lie side by side."""

    batch_first: Literal[True]


@dataclass(frozen=True, kw_only=True)
class BatchSecond(_OfAxes):
    """Tokens are the outermost axis: the order of pycls and of `nn.MultiheadAttention`.

    The tokens are transposed once, after the patch embedding; no block transposes again.
    pycls 484bb29 reports "~4% speedup in training"; torchvision's #4594 found the opposite sign for
    the same switch, so that a sweep has to tell.
    """

    batch_first: Literal[False]
