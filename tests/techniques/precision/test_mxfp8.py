"""MXFP8: emulated products equal slow code, the proof holds, and where it may run."""

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from tests.cells import GPU_NODE, TINY, entry
from tests.data.cells_and_worlds import world as lone_world
from tests.refusals import require
from tests.training.alone import alone
from vitsweep.console import TORCHAO_IMPORT, quiet_loggers
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.proof.twin import twin_of
from vitsweep.spec.resources import HERE
from vitsweep.techniques.precision import float8
from vitsweep.torch_compat import minor

pytestmark = pytest.mark.skipif(minor(version("torchao")) < (0, 18), reason="torchao < 0.18")

with quiet_loggers(*TORCHAO_IMPORT):
    from torchao.prototype.mx_formats import mx_tensor

    from vitsweep.model.mxfp8_linear import EmulatedMxfp8Linear

EMULATED = ("precision=mxfp8", "precision.emulate=true", "precision.layers=all")


def rounded(matrix: Tensor) -> Tensor:
    """Round a matrix (R, C) to MXFP8 along its rows, one number after the other."""
    found = matrix.clone()
    for row in found:
        for block in row.split(32):
            largest = block.abs().max()
            scale = torch.exp2(torch.ceil(torch.log2(largest / 448))) if largest else 1.0
            block.copy_((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return found


def test_emulated_products_equal_slow_code_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 96)
    linear.__class__ = EmulatedMxfp8Linear
    for spread in (1e-3, 1.0, 300.0):
        x, gradient = (torch.randn(2, 32, n, generator=generator) for n in (64, 96))
        x = (x * spread * torch.logspace(-3, 3, 64)).requires_grad_()
        output = linear(x)
        output.backward(gradient)
        rows, sent = x.detach().reshape(64, 64), gradient.reshape(64, 96)
        weight = linear.weight.detach()
        expected = rounded(rows) @ rounded(weight).t() + linear.bias
        assert torch.equal(output.reshape(64, 96), expected)
        assert x.grad is not None
        assert linear.weight.grad is not None
        assert torch.equal(x.grad.reshape(64, 64), rounded(sent) @ rounded(weight.t()).t())
        assert torch.equal(linear.weight.grad, rounded(sent.t()) @ rounded(rows.t()).t())
        assert not torch.equal(output.reshape(64, 96), rows @ weight.t() + linear.bias)
        linear.zero_grad()


def test_under_autocast_the_operands_are_bfloat16() -> None:
    linear = torch.nn.Linear(64, 96)
    linear.__class__ = EmulatedMxfp8Linear
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.randn(32, 64)).dtype is torch.bfloat16


def test_the_proof_passes_and_a_doubled_scale_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = alone(*EMULATED, "batch.images_per_step=32")
    prove(spec, lone_world())
    honest = mx_tensor.to_dtype
    calls = 0

    def doubled(*given: object, **named: object) -> Tensor:
        """Decode every second operand, the right one of each product, with twice its scale."""
        nonlocal calls
        calls += 1
        found: Tensor = honest(*given, **named)
        return found if calls % 2 else 2 * found

    monkeypatch.setattr(mx_tensor, "to_dtype", doubled)
    with pytest.raises(WrongResultError):
        prove(spec, lone_world())
    assert calls


def test_what_its_products_cannot_have_is_refused() -> None:
    assert not entry(*TINY, *EMULATED, "batch.images_per_step=64").reasons
    for typed, named in (
        (("batch.images_per_step=8",), "`batch.images_per_step=64`"),
        (("batch.images_per_step=64", "model.mlp_width=48"), "`model.mlp_width=64`"),
    ):
        require(" ".join(entry(*TINY, *EMULATED, *typed).reasons), named)
    told = " ".join(entry(*TINY, "precision=mxfp8", "batch.images_per_step=64").reasons)
    require(told, "`resources.device=cpu` `precision.emulate=true`")
    tiny = entry("model=vit_tiny", "data=synthetic", *EMULATED, "batch.images_per_step=64").spec
    twin = twin_of(tiny)
    assert {twin.transformer.width % 32, twin.transformer.mlp_width % 32} == {0}, "three heads"


def test_it_runs_on_blackwell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("model.width=1024", "model.mlp_width=4096", "model.num_heads=16")
    typed = (*TINY, *wide, "precision=mxfp8", "batch.images_per_step=1024")
    here = replace(GPU_NODE, described_by=HERE)
    for capability, runs in (((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(float8, "gpu_capability", lambda c=capability: c)
        reasons = " ".join(entry(*typed, machine=here).reasons)
        assert not reasons if runs else "`precision.emulate=true`" in reasons, capability
        assert not entry(*typed, "precision.emulate=true", machine=here).reasons
    monkeypatch.setattr("vitsweep.torch_compat.version", lambda name: "0.17.0")
    [told] = entry(*typed, machine=GPU_NODE).reasons
    require(told, "`precision=mxfp8` 0.18 0.17.0")
