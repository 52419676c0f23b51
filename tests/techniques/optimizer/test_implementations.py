import pytest
import torch
from torch import nn

from tests.cells import cell
from vitsweep.collectives.primitives import ALIGNMENT_BYTES
from vitsweep.spec.technique import OptimizerChoice
from vitsweep.training.update import parameter_groups

OTHERS = [
    ("adamw_foreach", "adamw_loop", {}),
    ("adamw_fused", "adamw_loop", {}),
    ("adamw_contiguous", "adamw_loop", {}),
    ("adamw_contiguous", "adamw_loop", {"implementation": "foreach"}),
    ("adamw_contiguous", "adamw_loop", {"implementation": "fused"}),
    ("sgd_foreach", "sgd_loop", {}),
    ("sgd_fused", "sgd_loop", {}),
    ("sgd_contiguous", "sgd_loop", {}),
    ("sgd_contiguous", "sgd_loop", {"implementation": "fused"}),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 2), nn.Flatten(), nn.LayerNorm(45), nn.Linear(45, 7)]
    return nn.Sequential(*layers).to(torch.float64)


def loss(net: nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    return net(images.to(next(net.parameters()))).square().mean()


def chosen(name: str, **overrides) -> OptimizerChoice:
    given = [f"optimizer.{key}={value}" for key, value in overrides.items()]
    return cell(f"optimizer={name}", *given).optimizer


def trained(name: str, steps: int = 5, net: nn.Module | None = None, **overrides) -> nn.Module:
    net = net or model()
    optimizer = chosen(name, learning_rate=0.01, **overrides).build(parameter_groups(net, 0.3))
    for step in range(steps):
        loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_every_implementation_makes_the_steps_of_the_loop():
    for name, plain, overrides in OTHERS:
        expected, found = trained(plain), trained(name, **overrides)

        for a, b in zip(expected.parameters(), found.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "key"), [("adamw_loop", None), ("adamw_foreach", "foreach"), ("adamw_fused", "fused")]
)
def test_the_implementation_is_the_one_that_was_asked_for(name, key):
    optimizer = chosen(name).build(parameter_groups(model(), 0.1))

    asked = {k: optimizer.defaults[k] for k in ("foreach", "fused")}
    assert asked == {"foreach": key == "foreach", "fused": key == "fused"}


def test_nesterov_looks_ahead():
    plain, ahead = trained("sgd_loop"), trained("sgd_loop", nesterov=True)

    assert not torch.equal(plain[0].weight, ahead[0].weight)


def test_contiguous_keeps_parameters_and_gradients_in_aligned_views():
    net = model()
    optimizer = chosen("adamw_contiguous").build(parameter_groups(net, 0.1))
    for step in range(2):
        loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    flats = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(flats) == 2  # decayed and not
    for p in net.parameters():
        homes = [
            f for f in flats if f.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
        ]
        assert len(homes) == 1
        assert p.grad.untyped_storage().data_ptr() == homes[0].grad.untyped_storage().data_ptr()
        assert p.storage_offset() * p.element_size() % ALIGNMENT_BYTES == 0
        assert not p.grad.any()


def test_contiguous_takes_one_buffer_per_dtype_and_keeps_channels_last():
    net = model().to(memory_format=torch.channels_last)
    net[2].float()
    optimizer = chosen("sgd_contiguous").build([{"params": list(net.parameters())}])

    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [torch.float64, torch.float32]
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(net[0].weight, model()[0].weight)


def test_contiguous_takes_over_gradients_that_exist_already():
    net = model()
    loss(net, 0).backward()
    before = [p.grad.clone() for p in net.parameters()]
    chosen("sgd_contiguous").build(parameter_groups(net, 0.1))

    assert all(torch.equal(a, p.grad) for a, p in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
def test_contiguous_refuses_to_step_after_views_were_replaced(kind):
    net = model()
    optimizer = chosen("adamw_contiguous").build(parameter_groups(net, 0.1))
    loss(net, 0).backward()
    if kind == "gradient":
        net.zero_grad(set_to_none=True)
    else:
        net[0].weight.data = net[0].weight.data.clone()

    with pytest.raises(RuntimeError, match="flat buffer"):
        optimizer.step()


def test_contiguous_works_with_clipping_and_gradient_scaling():
    plain, flat = model(), model()
    for name, net in (("adamw_loop", plain), ("adamw_contiguous", flat)):
        optimizer = chosen(name).build(parameter_groups(net, 0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss(net, 0)).backward()
        scaler.unscale_(optimizer)
        clipped = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(clipped, 1e-3)
        scaler.step(optimizer)

    for a, b in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_learning_rate_schedule_reaches_the_flat_buffers():
    net = model()
    optimizer = chosen("sgd_contiguous").build(parameter_groups(net, 0.0))
    before = net[0].weight.detach().clone()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    loss(net, 0).backward()
    optimizer.step()

    assert torch.equal(net[0].weight, before)
