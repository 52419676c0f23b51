"""What operators and kernels do: their class, by one table of names for CPU and CUDA, and their work."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan, prod
from typing import Any

import torch

from vitsweep.extras.explain.time_class import TimeClass

KINDS: tuple[tuple[TimeClass, str], ...] = (
    (TimeClass.communication, r"nccl|gloo|c10d|record_param_comms|symm_mem|multimem|all_reduce"),
    (
        TimeClass.fused,
        r"triton_(poi|per|red|for|mix|unk|_\d)|graph_.*_cpp_fused|cpp_fused|(?<!pre)compiled",
    ),
    (TimeClass.attention, r"flash|fmha|attention|sdpa|attn|^bwd_(kernel|preprocess)"),
    (TimeClass.optimizer, r"adam|multi_tensor|foreach|optimizer|sgd"),
    (
        TimeClass.products,
        r"(?<!fb)gemm|gemv|cijk_|scudnn|wgrad|dgrad|fprop|cublas(?!transpose)|cutlass|nvjet|xmma|splitk"
        r"|winograd|fft[12]d_|(?<![a-z])(add|badd|b|scaled_|int_)*mm(?![a-z])|matmul|linear(?!ize)"
        r"|conv(?!ert|olutionstruct)|einsum|(?<![a-z])(mv|dot|bilinear)(?![a-z])",
    ),
    (
        TimeClass.copies,
        r"copy|(?<!loadwith|torewith)(?<!no)(?<!out)cast|memcpy|memset|convert|clone|contiguous|catarray"
        r"|::(to|cat|stack|pad|constant_pad_nd|roll)$|transpose_(kernel|readwrite)|batched_transpose"
        r"|nchwtonhwc|nhwctonchw|nhwcslice|tensortransform|im\d?d?2col|fsdp::",
    ),
    (
        TimeClass.elementwise,
        r"norm|moments|rope_|subtensorop|scalepacked|(?<![a-z])bn_|pool|sort|devicescan|softmax|elementwise"
        r"|element_wise|reduce|gammabeta|cucompute|threshold_backward|gelu|silu|relu|sigmoid|tanh|nll_|loss|dropout|index"
        r"|embedding|scatter|gather|distribution|::(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt"
        r"|sum|mean|var|max|min|amax|amin|any|all|abs|sign|where|lerp|addcmul|addcdiv|fill|zero|ones|zeros"
        r"|ones_like|zeros_like|full|full_like|clamp|clamp_min|clamp_max|eq|ne|lt|le|gt|ge|bitwise_\w+|logical_\w+"
        r"|isfinite|isinf|isnan|erf|cumsum|sin|cos|normal|uniform|rand|randn|randperm|randint|bernoulli"
        r"|arange|masked_fill|tril|triu|one_hot|argmax|sort|topk|reciprocal|maximum|minimum"
        r"|std|square|item|_local_scalar_dense)_?$",
    ),
)
"""Class -> what its names hold, in lower case; the first that fits counts ("FusedAdam" has an "mm" where it
goes on with "MathFunctor")."""

_VIEW = re.compile(
    r"::(_?(un)?(view|reshape|expand|flatten|squeeze|fold|split|bind|safe_view|unsafe_view|resize)\w*|t|numpy_t"
    r"|transpose|permute|as_strided\w*|select|slice|narrow|chunk|movedim|detach\w*|alias|lift_fresh|empty\w*"
    r"|new_empty\w*|resolve_\w+|result_type|set_|is_\w+|size|stride|broadcast_\w+|type_as|real|numel|stft"
    r"|unsqueeze_?|_reshape_alias|_has_\w+|_nnpack_available|requires_grad_|retain_grad|swapaxes|unbind"
    r"|split_with_sizes\w*|unsafe_split\w*|lift|random_)$"
)
_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd)\w+::\w+(\.\w+)?$")
_KINDS = tuple((kind, re.compile(text)) for kind, text in KINDS)


@cache
def kind_of_kernel(name: str) -> TimeClass:
    """Return the class of a device's kernel or copy; `other` for what the table does not know."""
    return _known(name) or TimeClass.other


@cache
def kind_of_operator(name: str) -> TimeClass | None:
    """Return the class of an operator that the host runs.

    None for what computes nothing: views, and ranges that Python or autograd name.
    """
    if not _OPERATOR.match(name):
        return TimeClass.communication if name.startswith(("gloo:", "nccl:")) else None
    if _VIEW.search(name):
        return None
    return _known(name) or TimeClass.other


def _known(name: str) -> TimeClass | None:
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(lower)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a profiler recorded of one operator, kernel, range or collective.

    Attributes:
        name: of the operator or kernel.
        start: in nanoseconds of the profiler's clock.
        end: in the same.
        thread: of the host.
        on_device: a kernel or copy of the device.
        is_range: named by Python, not an operator.
        is_node: a node of autograd.
        sequence: number that autograd gave an operator of a forward pass; -1 without.
        id: correlation of a kernel with the operator that launched it, the same number at both; without
            an operator, with the call of the runtime, negative: all kernels of a CUDA graph have that of
            its launch.
        shapes: of the inputs.
        dtypes: of the inputs.
        values: of the inputs that are no tensors, by place; of convolutions only.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    on_device: bool = False
    is_range: bool = False
    is_node: bool = False
    sequence: int = -1
    id: int = 0
    shapes: Sequence[Any] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[Any] = ()

    @property
    def is_collective(self) -> bool:
        """Whether it is the transfer of a collective, waiting included."""
        on_device = self.on_device and not self.is_range
        return self.name.startswith("gloo:") or (on_device and self.name.startswith("nccl"))


_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2,
          "c10::BFloat16": 2, "bool": 1, "unsigned char": 1}  # fmt: skip


def work_of(event: Event) -> float:
    """Return the FLOPs of a product or of attention, by torch's own formulas; else the bytes it reads.

    0 where torch has no formula for it, NaN for the backward pass of attention in many operators.
    """
    if event.is_node:
        return 0.0 if "ScaledDotProduct" in event.name else nan
    kind = kind_of_operator(event.name)
    try:
        if kind is TimeClass.attention:
            return _attention_flops(event)
        if event.values:
            return _convolution_flops(event)
        if kind is TimeClass.products:
            formula = flop_formula(event.name)
            tensors = [shape for shape in event.shapes if shape]  # without factors such as beta
            return float(formula(*tensors, out_val=None)) if formula else 0.0
    except (TypeError, ValueError, AssertionError, IndexError):  # of another signature
        return 0.0
    pairs = zip(event.shapes, event.dtypes, strict=False)
    return float(sum(prod(s) * _BYTES.get(d, 0) for s, d in pairs if s and isinstance(s[0], int)))


def _attention_flops(event: Event) -> float:
    from torch.utils import flop_counter

    if "backward" in event.name:
        return float(flop_counter.sdpa_backward_flop_count(*event.shapes[:4]))
    return float(flop_counter.sdpa_flop_count(*event.shapes[:3]))


def _convolution_flops(event: Event) -> float:
    """Return the FLOPs of a convolution or its backward pass; the formula needs the shapes of the outputs."""
    formula, given = flop_formula(event.name), event.values[3:]
    first, second, third = event.shapes[:3]
    out: Any = second, third  # in the backward pass the gradients of images and weight
    if not event.name.endswith("backward"):
        sizes = zip(first[2:], second[2:], *given[:3], strict=True)
        out = [(n + 2 * pad - hole * (k - 1) - 1) // step + 1 for n, k, step, pad, hole in sizes]
        out = [*first[:2], *out]
    return float(formula(first, second, third, *given, out_val=out)) if formula else 0.0


@cache
def flop_formula(name: str) -> Callable[..., Any] | None:
    """Return the formula of torch for the FLOPs of an operator; None where it has none."""
    from torch.utils.flop_counter import flop_registry

    space, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), operator, None)
    found: Callable[..., Any] | None = flop_registry.get(packet)
    return found
