"""What operators and kernels do, by their names: one table for CPU and CUDA."""

import re
from functools import cache

from vitsweep.spec.measurement import TimeClass

KINDS: tuple[tuple[TimeClass, str], ...] = (
    (TimeClass.communication, r"nccl|gloo|c10d|record_param_comms"),
    (
        TimeClass.fused,
        r"triton_(poi|per|red|for|mix|unk|_\d)|graph_.*_cpp_fused|cpp_fused|compiled",
    ),
    (TimeClass.attention, r"flash|fmha|attention|sdpa|attn"),
    (TimeClass.optimizer, r"adam|multi_tensor|foreach|optim|sgd"),
    (
        TimeClass.products,
        r"(?<!fb)gemm|gemv|scudnn|wgrad|dgrad|fprop|cublas|cutlass|nvjet|xmma|splitk|winograd|(?<![a-z])(add|badd|b|scaled_|int_)*mm"
        r"(?![a-z])|matmul|linear|conv(?!ert)|einsum|(?<![a-z])(mv|dot|bilinear)(?![a-z])",
    ),
    (
        TimeClass.copies,
        r"copy|(?<!with)cast|memcpy|memset|convert|clone|contiguous|catarray|::(to|cat|stack|pad|constant_pad_nd|roll)$"
        r"|transpose_kernel|fsdp::",
    ),
    (
        TimeClass.elementwise,
        r"norm|(?<![a-z])bn_|pool|sort|devicescan|softmax|elementwise|element_wise|reduce|gammabeta|cucompute|gelu|silu|relu|sigmoid|tanh|nll_|loss"
        r"|dropout|index|embedding|scatter|gather|distribution|::(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt"
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
