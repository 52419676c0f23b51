from types import SimpleNamespace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from tests.choices import choice
from tests.shapes import CASES, NANO, assert_equal_step, build, replace, step
from vitsweep.model.flops import train_flops
from vitsweep.spec.technique import PrecisionPlan

ALL = ["keep_all", "recompute_blocks", "recompute_selected"]


def applied(name, kernel="sdpa_auto"):
    def apply(model):
        return choice("memory", name).apply(choice("attention", kernel).apply(model))

    return apply


def test_gradients_equal_those_of_the_reference_model():
    for kwargs in CASES.values():
        for name in ALL:
            assert_equal_step(applied(name), **kwargs)


def test_gradients_equal_under_every_attention():
    for kernel in ["sdpa_math", "sdpa_flash", "mha_module"]:
        for name in ALL:
            assert_equal_step(applied(name, kernel))


def test_a_step_runs_each_block_as_often_as_is_declared():
    for name in ALL:
        model, calls = applied(name)(build()), []
        norm = next(
            m
            for n, m in model.named_modules()
            if "blocks" in n and isinstance(m, torch.nn.LayerNorm)
        )
        norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step(model)
        assert len(calls) == choice("memory", name).forwards_per_step


@pytest.mark.parametrize("name", ALL)
def test_gradients_equal_under_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(build(dtype=torch.float32))
        other = step(applied(name)(build(dtype=torch.float32)))

    torch.testing.assert_close(other, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_names_of_parameters_stay(name):
    assert list(applied(name)(build()).state_dict()) == list(build().state_dict())


def peak_mib(name) -> float:
    """Peak of parameters, gradients and activations over one step of 256 images."""
    model = applied(name, "sdpa_flash")(build(replace(NANO, depth=4), dtype=torch.float32))
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(torch.randn(256, 3, 8, 8)).square().sum().backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / 2**20


def test_recomputing_lowers_the_peak_and_recomputing_all_lowers_it_most():
    keep_all, selected, blocks = map(
        peak_mib, ["keep_all", "recompute_selected", "recompute_blocks"]
    )

    assert selected < 0.8 * keep_all
    assert blocks < 0.5 * keep_all


def test_selective_recomputation_is_refused_where_norms_are_gathered_inside_a_block():
    def reasons(sharded, **plan):
        cell = SimpleNamespace(
            sharding=SimpleNamespace(name="fsdp", shards_parameters=sharded),
            precision=SimpleNamespace(name="O2", plan=lambda: PrecisionPlan(**plan)),
        )
        return list(choice("memory", "recompute_selected").conflicts(cell))

    (reason,) = reasons(True, param_dtype="bfloat16")
    assert all(name in reason for name in ("`sharding=fsdp`", "`precision=O2`"))
    assert not reasons(True, param_dtype="bfloat16", norm_dtype="bfloat16")
    assert not reasons(False, param_dtype="bfloat16")


KEPT = {
    ("linear", "attention"): (0, 0),
    ("attention",): (1, 0),
    ("linear",): (0, 1),
    ("linear", "attention", "norm", "activation"): (0, 0),
}


@pytest.mark.parametrize("keep", KEPT, ids=" ".join)
def test_what_is_not_kept_is_computed_again(keep):
    technique = choice("memory", "recompute_selected", keep=list(keep))
    assert_equal_step(technique.apply)
    counter = FlopCounterMode(display=False)
    with counter:
        step(technique.apply(choice("attention", "sdpa_math").apply(build())))
    repeated = counter.get_total_flops() - 3 * train_flops(NANO, 8, "token")
    assert (repeated > 0) == (max(KEPT[keep]) > 0)
