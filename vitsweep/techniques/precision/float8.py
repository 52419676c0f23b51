"""FP8 and MXFP8 training of the linear layers (Micikevicius et al., arXiv:2209.05433), through torchao."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import gcd, lcm
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.console import TORCHAO_IMPORT, quiet_loggers
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import FP8_CAPABILITY, gpu_capability
from vitsweep.spec.technique import DType, Precision, PrecisionPlan
from vitsweep.torch_compat import torchao_refusal

if TYPE_CHECKING:
    from torch import nn

MULTIPLES = {"mx": 32}
"""Recipe -> what inner sides are multiples of: blocks with one scale, or 16 (`torch._scaled_mm`)."""
MXFP8_CAPABILITY = 10
"""Major compute capability of the GPUs for which torchao has kernels of MXFP8."""


def gains(recipe: str, outputs: int, inputs: int) -> bool:
    """Return whether a linear is large enough to gain from FP8 on an H100.

    The thresholds of torchao (`float8_linear_utils._auto_filter_for_recipe`, private to it), which has none
    for `mx`: those of `tensorwise`.
    """
    multiple = MULTIPLES.get(recipe, 16)
    if outputs % multiple or inputs % multiple:
        return False
    if recipe == "rowwise":
        return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
    return inputs > 4096 or outputs > 1024


@dataclass(frozen=True, kw_only=True)
class Float8(Precision):
    """The blocks' linears multiply in float8 with dynamic scales; all else is bfloat16.

    Parameters, gradients and optimizer state stay float32, and the rest is autocast; or forward and
    backward see bfloat16 parameters whose float32 masters the optimizer updates, and activations
    between the products have half the bytes (`master_weights`). The patch embedding and the head are
    left out: they are small and decide the accuracy.

    Finding the scales and casting are kernels of their own unless a compiler fuses them into their
    neighbours: with `compilation=eager` FP8 is usually slower than bfloat16 (torchao's README
    measures it under torch.compile only).

    Attributes:
        recipe: `tensorwise` takes one scale per tensor; `rowwise` one per row, slower and safer
            with outliers; `mx` one per 32 numbers along the inner side, a power of two (MXFP8).
        layers: `all` linears of the blocks, or those that are `gaining`: large enough, by torchao's
            thresholds for its recipes on H100, that their products gain more than the casts cost.
        master_weights: bfloat16 parameters with float32 masters, as `precision=bf16_masters` has them.
        emulate: compute in float32 what float8 would give, for devices without FP8 units; how long that
            takes says nothing of float8.
    """

    recipe: Literal["tensorwise", "rowwise", "mx"]
    emulate: bool
    layers: Literal["gaining", "all"]
    master_weights: bool

    float8: ClassVar[bool] = True

    @property
    def multiple(self) -> int:
        """What rows and sides of the products are multiples of."""
        return MULTIPLES.get(self.recipe, 16)

    def plan(self) -> PrecisionPlan:
        """Autocast for what is not swapped, which emulation has in float32; or masters."""
        if self.master_weights:
            half: DType = "bfloat16"
            return PrecisionPlan(param_dtype=half, norm_dtype=half, master_weights=True)
        return PrecisionPlan(autocast_dtype=None if self.emulate else "bfloat16")

    def relative_tolerance(self) -> float:
        """float8 e4m3 keeps three bits of mantissa."""
        return 1e-1

    def convert(self, model: "nn.Module") -> "nn.Module":
        """Swap the linears inside the blocks."""
        import torch

        from vitsweep.model.block import ConditionLinear, stacks_of

        with quiet_loggers(*TORCHAO_IMPORT):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        inside = {module for stack in stacks_of(model) for module in stack.modules()}

        def is_inside_a_block(module: torch.nn.Module, name: str) -> bool:
            if not (isinstance(module, torch.nn.Linear) and module in inside):
                return False
            if isinstance(module, ConditionLinear):  # of few rows, which need not be multiples
                return False
            return self.converts(*module.weight.shape)

        if self.recipe == "mx":
            with quiet_loggers(*TORCHAO_IMPORT):
                from vitsweep.model import mxfp8_linear

            emulated, real = mxfp8_linear.EmulatedMxfp8Linear, mxfp8_linear.Mxfp8Linear
            for module in model.modules():
                if is_inside_a_block(module, ""):
                    module.__class__ = emulated if self.emulate else real
            return model
        if self.emulate:
            config = Float8LinearConfig(emulate=True)
        else:
            config = Float8LinearConfig.from_recipe_name(self.recipe)
        converted: torch.nn.Module = convert_to_float8_training(
            model, config=config, module_filter_fn=is_inside_a_block
        )
        return converted

    def of_twin(self) -> "Float8":
        """Convert all linears: those of a nano copy are small."""
        return replace(self, layers="all")

    def converts(self, outputs: int, inputs: int) -> bool:
        """Return whether a linear of the blocks multiplies in float8."""
        return self.layers == "all" or gains(self.recipe, outputs, inputs)

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse what lacks torchao, widths that are multiples of 16 (`mx`: 32), or FP8 units."""
        oldest = (0, 18) if self.recipe == "mx" else (0, 0)
        yield from torchao_refusal(f"precision={self.name}", "fp8", "precision=bf16", oldest)
        multiple = self.multiple
        for knob in ("width", "mlp_width"):
            size = getattr(cell.transformer, knob)
            if size % multiple:
                yield (
                    f"`precision={self.name}` needs `model.{knob}` divisible by {multiple}; got "
                    f"{size}: try `model.{knob}={round(size / multiple) * multiple or multiple}`."
                )
        width, hidden = cell.transformer.width, cell.transformer.mlp_width
        shapes = ((3 * width, width), (width, width), (hidden, width), (width, hidden))
        if not any(self.converts(*shape) for shape in shapes):
            yield (
                f"`precision.layers=gaining` converts no linear of `model.width={width}` and "
                f"`model.mlp_width={hidden}`: by torchao's thresholds none gains from "
                f"`precision.recipe={self.recipe}`. Use a wider model, `precision.layers=all`, or "
                "`precision=bf16`."
            )
        if not self.emulate or self.recipe == "mx":
            yield from _row_conflicts(cell, multiple)
        if self.emulate and self.recipe == "rowwise":
            yield "`precision.emulate=true` needs `precision.recipe=tensorwise`, or `mx`."
        if cell.resources.device == "cpu" and not self.emulate:
            yield self._needs_gpu("this cell has `resources.device=cpu`")

    def lacking_here(self, cell: CellSpec) -> Iterator[str]:
        """Say where the GPU has no FP8 units, or none for which torchao's kernels of MXFP8 are."""
        found = gpu_capability()
        if self.emulate or found is None:
            return
        if found[0] != MXFP8_CAPABILITY if self.recipe == "mx" else found < FP8_CAPABILITY:
            yield self._needs_gpu(f"this machine's has {found[0]}.{found[1]}")

    def _needs_gpu(self, but: str) -> str:
        units = "8.9 (Ada), 9.0 (Hopper) or newer"
        units = f"{MXFP8_CAPABILITY}.x (Blackwell)" if self.recipe == "mx" else units
        return (
            f"`precision={self.name}` needs a GPU with FP8 units, of compute capability {units}, and {but}: "
            "use `precision=bf16`, or `precision.emulate=true` to see its rounding, not its speed."
        )


def _row_conflicts(cell: CellSpec, multiple: int) -> Iterator[str]:
    """Refuse products whose rows, computed images x kept tokens, are no multiple of 16 or 32.

    The gradient of a weight is a product over the rows.
    """
    if not cell.mesh.data_parallel_size or any(cell.sequence_parallel.conflicts(cell)):
        return  # tokens cannot be divided among ranks, which has a reason of its own
    counts = set(cell.sequence_parallel.tokens_per_rank(cell))
    parts = cell.pipeline_parallel.microbatches
    images = cell.images_per_forward
    computed = cell.vit_block.kept(images)
    unit = lcm(*(multiple // gcd(multiple, tokens) for tokens in counts))
    if computed % unit == 0:
        return
    tokens = next(t for t in sorted(counts) if computed * t % multiple)
    replicas = 1 if cell.batch.scope == "per_replica" else cell.mesh.data_parallel_size
    per_image = parts * cell.batch.accumulation_steps * replicas
    fits = next(n for n in count(images + 1) if cell.vit_block.kept(n) % unit == 0)
    yield (
        f"`precision={cell.precision.name}` multiplies matrices of images x tokens rows, which must "
        f"be divisible by {multiple}; got {computed} x {tokens}: try "
        f"`batch.images_per_step={per_image * fits}`."
    )
