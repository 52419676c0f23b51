"""What a traced step spends its time on, by one table of names for CPU and CUDA (no torch)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

POOLED, BETWEEN = "(smaller)", "(between operators)"
"""What a trace calls the small operators of a class together, and the time between operators."""


class TimeClass(StrEnum):
    """What the time of a traced step is spent on; each instant belongs to one class."""

    products = "matrix products"
    attention = "attention"
    elementwise = "normalization and element-wise"
    copies = "casts and copies"
    fused = "fused kernels"
    other = "other operators"
    recomputation = "recomputation"
    optimizer = "optimizer"
    communication = "exposed communication"
    ranks = "waiting for ranks"
    data = "waiting for data"
    host = "launch gaps (host)"


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

    @property
    def is_collective(self) -> bool:
        """Whether it is the transfer of a collective, waiting included."""
        on_device = self.on_device and not self.is_range
        return self.name.startswith("gloo:") or (on_device and self.name.startswith("nccl"))
