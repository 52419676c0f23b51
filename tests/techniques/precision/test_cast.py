"""Casting a model leaves complex numbers complex: rotations, Fourier filters."""

import torch
from torch import nn

from vitsweep.model.precision import cast_model
from vitsweep.proof.reference import _cast
from vitsweep.spec.technique import PrecisionPlan


class Turned(nn.Module):
    """Two numbers of which a rotation is kept as a complex buffer, beside a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.filter = nn.Parameter(torch.full((2,), 1 + 2j))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mean", torch.ones(2))


def test_only_floating_point_tensors_are_cast() -> None:
    for dtype, complex_dtype in [
        ("float32", torch.complex64),
        ("bfloat16", torch.complex64),
        ("float16", torch.complex64),
        ("float64", torch.complex128),
    ]:
        for cast in ["of the techniques", "of the reference"]:
            model, wanted = Turned(), getattr(torch, dtype)
            if cast == "of the techniques":
                plan = PrecisionPlan(param_dtype=dtype, norm_dtype=dtype)
                cast_model(model, plan, sharded_masters=False)
            else:
                _cast(model, wanted)
            assert model.linear.weight.dtype == model.mean.dtype == wanted
            assert model.turn.dtype == model.filter.dtype == complex_dtype
            assert model.turn.imag.abs().max() > 0.5
            assert model.filter.imag.eq(2).all()
            assert model.count.dtype == torch.int64
