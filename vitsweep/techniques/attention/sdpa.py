"""torch's scaled_dot_product_attention, by the kernel torch picks or by a named one."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from vitsweep.spec.technique import AttentionKernel, Technique

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec

ON_CPU = ("auto", "math", "flash")
"""Backends that torch has on CPU, forward and backward."""

HALF_ONLY = ("flash", "cudnn")
"""Backends that take float16 and bfloat16 only, on CUDA (flash on CPU takes every float type)."""


@dataclass(frozen=True, kw_only=True)
class ScaledDotProduct(AttentionKernel):
    """`torch.nn.functional.scaled_dot_product_attention`.

    Attributes:
        backend: `auto` leaves the choice to torch; `math` computes and keeps the scores; `flash`
            (arXiv:2205.14135), `efficient` (xFormers) and `cudnn` never write them to memory.
            `cudnn_first` lets torch choose with cuDNN's kernel before all others, which torch prefers to
            its flash kernel on some GPUs and in some versions only; the record names the one that ran.
        text: of cross-attention to texts of several lengths: all are computed as the longest one, and scores
            beyond their ends are `masked`; or they are `packed` one after the other.
        flash_kernel: torch's own; it keeps the ids of cells from when another package's could be registered.
    """

    backend: Literal["auto", "math", "flash", "efficient", "cudnn", "cudnn_first"]
    flash_kernel: Literal["torch"] = "torch"
    text: Literal["masked", "packed"] = field(
        default="masked", metadata={"identity": "unless default"}
    )

    @property
    def recomputes_scores(self) -> bool:
        """Whether the backward pass computes q k^T again; `auto` picks a fused kernel here."""
        return self.backend != "math"

    def trace_substitute(self) -> tuple[Technique, str]:
        """Torch's own choice for all fused kernels."""
        return (self if self.backend == "math" else replace(self, backend="auto")), ""

    @property
    def needs_transformer(self) -> bool:
        """`auto` is the default of the group, which models without attention have as well."""
        return self.backend != "auto"

    @property
    def ring_computes_the_same(self) -> bool:
        """True for `auto` and `flash`: a ring runs flash attention block by block."""
        return self.backend in ("auto", "flash")

    @property
    def replaces_attend_alone(self) -> bool:
        """All but cuDNN's kernel, which takes heads of certain widths."""
        return self.backend != "cudnn"

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Say what the device or the number format has no kernel for, and where no text is packed."""
        if self.text == "packed" and getattr(cell.model, "text_width", None) is None:
            yield (
                f"`attention.text=packed` is for texts of several lengths, and `model={cell.model.name}` on "
                f"`data={cell.data.name}` reads none: use a `stdit_*` on `data=synthetic_latents`, or leave "
                "it out."
            )
        if cell.resources.device == "cpu":
            if self.backend not in ON_CPU:
                yield (
                    f"`attention={self.name}` needs `resources.device=cuda`; got cpu, for which "
                    f"torch has no `{self.backend}` kernel. Use `attention=sdpa_flash` or "
                    "`attention=sdpa_auto`."
                )
            return
        dtype = compute_dtype(cell)
        if self.backend in HALF_ONLY and dtype not in ("float16", "bfloat16"):
            yield (
                f"`attention={self.name}` computes in float16 or bfloat16 on cuda; "
                f"`precision={cell.precision.name}` computes in {dtype}. Use a half precision such "
                "as `precision=O1`, or `attention=sdpa_efficient`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Ask for the named kernel in every block; `auto` leaves the model as it is."""
        from vitsweep.techniques.attention.kernels import attend_everywhere_by

        for module in model.modules() if self.text == "packed" else ():
            if "packed" in vars(module):
                vars(module)["packed"] = True
        return model if self.backend == "auto" else attend_everywhere_by(model, self.backend)


def compute_dtype(cell: "CellSpec") -> str:
    """Return the number format in which attention computes."""
    plan = cell.precision.plan()
    return plan.autocast_dtype or plan.param_dtype
