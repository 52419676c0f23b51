"""The shape by which each kind of operator is counted."""

import torch
from torch import Tensor

from vitsweep.extras.predict.recorder import (
    _attention,
    _convolution,
    _is_by_weight,
    _kind_and_shape,
)

aten = torch.ops.aten


def of(*shape: int) -> Tensor:
    return torch.empty(shape)


def test_a_product_is_of_m_by_k_and_k_by_n() -> None:
    for packet, args, shape in (
        (aten.mm, (of(2, 3), of(3, 5)), (1, 2, 5, 3)),
        (aten.bmm, (of(7, 2, 3), of(7, 3, 5)), (7, 2, 5, 3)),
        (aten.addmm, (of(5), of(2, 3), of(3, 5)), (1, 2, 5, 3)),
        (aten.baddbmm, (of(7, 2, 5), of(7, 2, 3), of(7, 3, 5)), (7, 2, 5, 3)),
    ):
        assert _kind_and_shape(packet, args, []) == ("matmul", shape)
    by_weight = of(3, 2).t()
    assert _is_by_weight(aten.mm, (by_weight, of(3, 5)))
    assert not _is_by_weight(aten.mm, (of(2, 3), of(3, 5)))
    assert not _is_by_weight(aten.bmm, (by_weight, of(3, 5)))


def test_a_convolution_is_the_product_over_its_patches() -> None:
    for sides, kernel, stride, padding, groups, places in (
        ((8, 8), (3, 3), [1, 1], [1, 1], 1, 64),
        ((8, 8), (3, 3), [1, 1], [0, 0], 1, 36),
        ((8, 8), (4, 4), [4, 4], [0, 0], 1, 4),
        ((9, 8), (3, 2), [2, 3], [0, 1], 2, 4 * 3),
        ((4, 8, 8), (2, 4, 4), [2, 4, 4], [0, 0, 0], 1, 8),
    ):
        inputs, weight = of(2, 6, *sides), of(10, 6 // groups, *kernel)
        product = 1
        for size in kernel:
            product *= size
        expected = (groups, 2 * places, 10 // groups, 6 // groups * product)
        assert _convolution(inputs, weight, stride, padding, groups) == expected
        forward = (inputs, weight, None, stride, padding, None, False, None, groups)
        assert _kind_and_shape(aten.convolution, forward, []) == ("convolution", expected)
        backward = (of(1), inputs, weight, None, stride, padding, None, False, None, groups)
        found = _kind_and_shape(aten.convolution_backward, backward, [])
        assert found == ("convolution", expected)


def test_attention_is_of_queries_by_keys_and_all_else_of_its_largest_tensor() -> None:
    assert _attention(of(2, 3, 5, 7), of(2, 3, 11, 7)) == (2, 3, 5, 11, 7)
    a, b = of(2, 3), of(4)
    assert _kind_and_shape(aten.add, (a, b), [a, b]) == ("memory", (6,))
    assert _kind_and_shape(aten._foreach_add, ([a, b], [b]), [a, b, b]) == ("memory", (10, 2))
