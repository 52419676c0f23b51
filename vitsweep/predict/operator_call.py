"""What one call of an ATen operator computes and moves (needs torch)."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from vitsweep.predict.step_trace import BY_WEIGHT, OperatorKind, OperatorTotal

aten = torch.ops.aten

NO_KERNEL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.alias,
    aten.detach,
    aten.detach_,
    aten._local_scalar_dense,
    aten.set_,
    aten.resize_,
}
"""Operators that read and write no elements."""

ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}
WRITE_ONLY = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
"""Operators in place that do not read what they overwrite."""


def operator_call(
    func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperatorTotal | None:
    """Describe one call; its phase is not known here, and what is `optimizer` later is `memory`.

    Args:
        func: overload of the operator.
        result: what it returned.
        args: as dispatched.
        kwargs: as dispatched.

    Returns:
        None for views and for what reads and writes no elements.
    """
    packet = func._overloadpacket
    if func.is_view or packet in NO_KERNEL:
        return None
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    if not tensors and not isinstance(result, Tensor):
        return None
    first = tensors[0] if tensors else result
    kind, shape = _kind_and_shape(packet, args, tensors or [result])
    return OperatorTotal(
        kind=kind,
        phase="forward",
        count=1,
        name=BY_WEIGHT
        if _is_by_weight(packet, args)
        else packet._qualified_op_name.split("::")[-1],
        dtype=str(first.dtype).removeprefix("torch."),
        shape=shape,
        flops=_flops(packet, kind, shape, args, kwargs | {"out_val": result}),
        bytes_moved=_bytes_moved(func, result, args, kwargs),
    )


def _is_by_weight(packet: Any, args: tuple[Any, ...]) -> bool:
    return packet is aten.mm and args[0].t().is_contiguous() and not args[0].is_contiguous()


def _kind_and_shape(
    packet: Any, args: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[OperatorKind, tuple[int, ...]]:
    if packet in (aten.mm, aten.bmm, aten._scaled_mm):
        return "matmul", _product(args[0], args[1])
    if packet in (aten.addmm, aten.baddbmm):
        return "matmul", _product(args[1], args[2])
    if packet is aten.convolution:
        return "convolution", _convolution(args[0], args[1], args[3], args[4], args[8])
    if packet is aten.convolution_backward:
        return "convolution", _convolution(args[1], args[2], args[4], args[5], args[9])
    if packet in ATTENTION:
        return "attention", _attention(args[0], args[1])
    if packet in ATTENTION_BACKWARD:
        return "attention", _attention(args[1], args[2])
    lists = [a for a in args if isinstance(a, (list, tuple)) and _is_tensors(a)]
    if lists:
        return "memory", (sum(t.numel() for t in lists[0]), len(lists[0]))
    return "memory", (max(t.numel() for t in tensors),)


def _product(left: Tensor, right: Tensor) -> tuple[int, ...]:
    """(batch, m, n, k) of (m, k) x (k, n), or of a batch of these."""
    return prod(left.shape[:-2]), left.shape[-2], right.shape[-1], left.shape[-1]


def _convolution(
    inputs: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int
) -> tuple[int, ...]:
    """(groups, m, n, k) of the product that a convolution is, dilation left out."""
    sides = [
        (size + 2 * pad - kernel) // step + 1
        for size, pad, kernel, step in zip(
            inputs.shape[2:], padding, weight.shape[2:], stride, strict=True
        )
    ]
    return groups, inputs.shape[0] * prod(sides), weight.shape[0] // groups, prod(weight.shape[1:])


def _attention(q_BHTK: Tensor, k_BHSK: Tensor) -> tuple[int, ...]:
    batch, heads, queries, width = q_BHTK.shape
    return batch, heads, queries, k_BHSK.shape[2], width


def _bytes_moved(func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes read and written: arguments, and results or the arguments that are changed in place."""
    reads, writes = 0, 0
    name = func._overloadpacket.__name__
    values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
    for argument, value in zip(func._schema.arguments, values, strict=False):
        size = sum(_held(t) for t in _tensors([value]))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and name.startswith("_fused_") and argument.name == "grads":
            written = False  # changed by a loss scale alone
        writes += size * written
        reads += size * (not (written and (name in WRITE_ONLY or argument.kwarg_only)))
    if not writes:
        writes = sum(_held(t) for t in _tensors([result]))
    return reads + writes


def _held(tensor: Tensor) -> int:
    """Bytes of a tensor; of an expanded one those that exist."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _is_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _flops(packet: Any, kind: OperatorKind, shape: tuple[int, ...], args: Any, rest: Any) -> int:
    """FLOPs of one call, one multiply-add = 2.

    By torch's formulas, but for what they get wrong or leave out (2.11 to 2.13): gradients of
    filters in groups, flash attention on CPU, masked pairs, which flash attention skips.
    """
    if kind == "convolution":
        gradients = args[10] if packet is aten.convolution_backward else (True, False, False)
        return 2 * prod(shape) * sum(gradients[:2])
    if kind == "attention":
        batch, heads, queries, keys, width = shape
        backward = (
            packet in ATTENTION_BACKWARD
        )  # with q k^T once more, five products instead of two
        whole = batch * heads * queries * keys * 2 * width * (5 if backward else 2)
        return whole * (keys + 1) // (2 * keys) if _is_causal(args, backward) else whole
    counted = flop_counter.flop_registry.get(packet)
    return int(counted(*args, **rest)) if counted else 0


def _is_causal(args: tuple[Any, ...], backward: bool) -> bool:
    """Whether flash attention (for CPU) has a causal mask."""
    at = 7 if backward else 4
    return len(args) > at and args[at] is True
