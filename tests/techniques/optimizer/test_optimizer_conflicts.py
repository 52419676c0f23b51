import pytest

from tests.cells import LAPTOP, cell
from tests.refusals import require
from vitsweep.spec.resources import Machine


def reasons(*overrides: str, machine: Machine = LAPTOP) -> list[str]:
    asked = cell(*overrides, machine=machine)
    return list(asked.optimizer.conflicts(asked))


@pytest.mark.parametrize("sharding", ["fsdp", "zero1", "zero2", "hsdp"])
@pytest.mark.parametrize("name", ["adamw_contiguous", "sgd_contiguous"])
def test_contiguous_refuses_shards(name, sharding):
    (reason,) = reasons(f"optimizer={name}", f"sharding={sharding}")

    require(reason, f"`optimizer={name}` `sharding={sharding}` `sharding=ddp`")


def test_contiguous_refuses_gradients_in_ddp_buckets():
    views = "sharding.gradient_as_bucket_view=true"
    (reason,) = reasons("optimizer=adamw_contiguous", views)

    assert reason.endswith("use `sharding.gradient_as_bucket_view=false`.")


def test_ddp_leaves_gradients_where_contiguous_keeps_them():
    assert not cell("optimizer=adamw_contiguous").sharding.gradient_as_bucket_view
    assert cell("optimizer=adamw_loop").sharding.gradient_as_bucket_view
    assert not reasons("optimizer=adamw_contiguous")


@pytest.mark.parametrize("name", ["sgd_fused", "sgd_contiguous"])
def test_fused_sgd_refuses_half_precision_parameters_on_cpu(name):
    (reason,) = reasons(f"optimizer={name}", "optimizer.implementation=fused", "precision=O3")

    require(reason, f"`optimizer={name}`")
    assert "bfloat16" in reason
    assert not reasons("optimizer=sgd_fused", "precision=O2")


def test_an_eps_that_float16_cannot_hold_is_refused():
    half = ("precision=O3", "precision.half_dtype=float16")
    (reason,) = reasons(*half, "optimizer.eps=1e-8")

    require(reason, "`optimizer.eps=1e-08` `precision=O3`")
    assert not reasons(*half)


def test_nesterov_needs_momentum():
    (reason,) = reasons("optimizer=sgd_loop", "optimizer.momentum=0.0", "optimizer.nesterov=true")

    assert reason == "`optimizer.nesterov=true` needs `optimizer.momentum` above 0."
