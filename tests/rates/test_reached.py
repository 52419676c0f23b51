"""Which rates of a machine are measured."""

from types import SimpleNamespace

import torch

from vitsweep.rates import reached


def test_products_in_float8_take_the_second_operand_by_columns() -> None:
    world = SimpleNamespace(device=torch.device("meta"))
    product = reached._matmul(64, torch.float8_e4m3fn, world)()  # type: ignore[arg-type]
    assert isinstance(product, torch.Tensor)
    assert (product.shape, product.dtype) == ((64, 64), torch.bfloat16)
