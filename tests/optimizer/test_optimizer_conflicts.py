import importlib.machinery
from types import SimpleNamespace

import pytest

from tests.choices import choice
from vitsweep.optimizer import apex_adamw


def cell(sharding: str, device: str = "cpu", **overrides) -> SimpleNamespace:
    return SimpleNamespace(
        sharding=choice("sharding", sharding, **overrides),
        resources=SimpleNamespace(device=device),
    )


def ddp(bucket_views: bool, **kwargs) -> SimpleNamespace:
    return cell("ddp", gradient_as_bucket_view=bucket_views, **kwargs)


@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "hsdp"])
@pytest.mark.parametrize("name", ["adamw_contiguous", "sgd_contiguous"])
def test_contiguous_refuses_shards(name, sharding):
    (reason,) = choice("optimizer", name).conflicts(cell(sharding))

    assert reason.startswith(f"`optimizer={name}` moves whole parameters into one buffer, but")
    assert f"`sharding={sharding}`" in reason
    assert reason.endswith("or `sharding=ddp`.")


def test_contiguous_refuses_zero1_because_one_rank_would_hold_everything():
    zero1 = cell("zero1", gradient_as_bucket_view=False)
    (reason,) = choice("optimizer", "adamw_contiguous").conflicts(zero1)

    assert "one rank would hold all the state" in reason
    assert "use `optimizer=adamw_fused`" in reason


def test_contiguous_refuses_gradients_in_ddp_buckets():
    (reason,) = choice("optimizer", "adamw_contiguous").conflicts(ddp(bucket_views=True))

    assert reason.endswith("use `sharding.gradient_as_bucket_view=false`.")
    assert not list(choice("optimizer", "adamw_contiguous").conflicts(ddp(bucket_views=False)))


def test_contiguous_tells_ddp_to_keep_gradients_where_they_are():
    assert type(choice("optimizer", "adamw_contiguous")).keeps_gradient_views
    assert type(choice("optimizer", "sgd_contiguous")).keeps_gradient_views
    assert not type(choice("optimizer", "adamw_loop")).keeps_gradient_views


def test_fused_sgd_refuses_shards_and_fused_adamw_does_not():
    (reason,) = choice("optimizer", "sgd_fused").conflicts(cell("fsdp"))

    assert "no sharding strategy for `aten._fused_sgd_`" in reason
    assert "use `optimizer=sgd_foreach`" in reason
    assert not list(choice("optimizer", "sgd_fused").conflicts(ddp(bucket_views=True)))
    assert not list(choice("optimizer", "adamw_fused").conflicts(cell("fsdp")))


def test_nesterov_needs_momentum():
    (reason,) = choice("optimizer", "sgd_loop", momentum=0.0, nesterov=True).conflicts(cell("fsdp"))

    assert reason == "`optimizer.nesterov=true` needs `optimizer.momentum` above 0."


def test_apex_is_refused_where_it_is_not_installed():
    reasons = list(choice("optimizer", "adamw_apex").conflicts(ddp(bucket_views=True)))

    assert "the package `apex` on PyPI is something else" in reasons[0]
    assert "runs on GPUs only" in reasons[1]


def test_the_apex_of_pypi_is_not_taken_for_nvidias(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(apex_adamw, "find_spec", lambda name: spec)
    assert not apex_adamw.apex_is_installed()

    (tmp_path / "optimizers").mkdir()
    (tmp_path / "optimizers" / "fused_adam.py").touch()
    assert apex_adamw.apex_is_installed()


def test_apex_refuses_shards(monkeypatch):
    monkeypatch.setattr(apex_adamw, "apex_is_installed", lambda: True)
    (reason,) = choice("optimizer", "adamw_apex").conflicts(cell("fsdp", device="cuda"))

    assert "know no DTensor" in reason
