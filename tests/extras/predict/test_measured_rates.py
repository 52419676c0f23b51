"""Rates of a processor: interpolated between the operators that were timed on it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.extras.predict.traces import exchange, moved, product
from vitsweep.extras.predict.measured_rates import IN_STEPS, MESSAGE_US, MeasuredRates
from vitsweep.extras.predict.profile_rates import Curve
from vitsweep.extras.predict.timed_operators import Times

GFLOPS, GB_S = 100, 10


def row(kind: str, name: str, shape: list[int], us: float, **facts: Any) -> dict[str, Any]:
    known = {"kind": kind, "name": name, "dtype": "float32", "shape": shape, "us": us}
    return {**known, "backward": False, "bytes_moved": 0, **facts}


PRODUCT = row("matmul", "addmm", [1, 300, 300, 300], 2 * 300**3 / GFLOPS / 1e3 / IN_STEPS)


def times(ranks: int = 1) -> Times:
    """A machine of 100 GFLOP/s and 10 GB/s in steps, whose all-reduce moves 1 GB/s after 100 us."""
    adds = [
        row("memory", "add", [n], 12 * n / GB_S / 1e3 / IN_STEPS, bytes_moved=12 * n)
        for n in (1000, 10**6)
    ]
    sent = [
        {"name": "all_reduce", "dtype": "float32", "bytes": n, "ranks": ranks, "us": 100 + n / 1e3}
        for n in (1000, 10**6, 10**8)
    ]
    return {"operators": [PRODUCT, *adds], "collectives": sent if ranks > 1 else []}


def rates(of: Times, timed: int = 1, used: int | None = None) -> MeasuredRates:
    return MeasuredRates(
        of, timed=(timed, 1), used=(used or timed, 1), cores=2, device="a processor"
    )


def test_products_have_the_measured_time_and_all_else_that_of_its_bytes() -> None:
    found = rates(times())
    timed = replace(product(300, 300, 300), dtype="float32")
    assert found.operator_us(timed) == pytest.approx(timed.flops / GFLOPS / 1e3)
    in_images = replace(timed, kind="convolution", shape=(3, 100, 300, 300))
    assert found.operator_us(in_images) == found.operator_us(timed)
    unknown_name = replace(moved(60_000), name="never_measured", dtype="float32")
    assert found.operator_us(unknown_name) == pytest.approx(60_000 / GB_S / 1e3, rel=0.01)


def test_one_disturbed_point_does_not_explode_beyond_the_measured_ones() -> None:
    """Time grows with the size at most in proportion, and does not shrink."""
    disturbed = Curve({256: 1.0, 8192: 10_000.0}, slope_ends=True)
    assert disturbed(81_920) == pytest.approx(100_000)
    assert Curve({256: 5.0, 8192: 1.0}, slope_ends=True)(81_920) == pytest.approx(1)


def test_products_of_the_backward_pass_have_rates_of_their_own() -> None:
    """Attention counts five products backward, and half of them with a causal mask."""
    attention = [
        row("attention", "attention", [2, 4, 64, 64, 32], 100.0 * factor, backward=factor > 1)
        for factor in (1, 3)
    ]
    slow = PRODUCT | {"name": "mm.t", "us": 3 * PRODUCT["us"]}
    found = rates(times() | {"operators": [*times()["operators"], slow, *attention]})
    forward = replace(product(300, 300, 300), dtype="float32")
    by_weight = replace(forward, name="mm.t")
    assert found.operator_us(by_weight) == pytest.approx(3 * found.operator_us(forward))
    whole = 2 * 2 * 4 * 64 * 64 * 32
    for name, products, us in (("flash", 2, 100), ("flash_backward", 5, 300)):
        each = replace(
            forward,
            kind="attention",
            name=name,
            shape=(2, 4, 64, 64, 32),
            flops=whole * products // 2,
        )
        assert found.operator_us(each) == pytest.approx(IN_STEPS * us / 2)


def test_what_was_not_timed_has_no_time() -> None:
    attention = replace(product(1, 1, 1), kind="attention", shape=(2, 4, 64, 64, 32))
    other = replace(product(300, 300, 301), dtype="float32")
    for operator in (product(300, 300, 300), attention, other):
        with pytest.raises(ValueError, match=rf"^[a-z]+ of .*{operator.dtype}"):
            rates(times()).operator_us(operator)
    with pytest.raises(ValueError, match=r"all_gather.*float32"):
        rates(times(2), timed=2).collective_us(exchange(10, "all_gather", ranks=2))


def test_sums_of_half_precision_have_a_time_of_their_own() -> None:
    two = times(ranks=2)
    slow = [c | {"dtype": "bfloat16", "us": 2 * c["us"]} for c in two["collectives"]]
    found = rates(two | {"collectives": [*two["collectives"], *slow]}, timed=2)
    plain = exchange(10**6, ranks=2)
    in_half = found.collective_us(replace(plain, dtype="bfloat16"))
    assert in_half - MESSAGE_US == pytest.approx(2 * (found.collective_us(plain) - MESSAGE_US))


def test_collectives_are_read_between_sizes_and_more_ranks_than_cores_share_them() -> None:
    """Within a step each waits for the cores, whatever its size."""
    two = rates(times(ranks=2), timed=2)
    for size, alone in ((10**6, 1100), (10**7, 10_100)):
        us = two.collective_us(exchange(size, ranks=2))
        assert us == pytest.approx(alone + MESSAGE_US, rel=0.05)
    four = rates(times(ranks=2), timed=2, used=4)
    us = four.collective_us(exchange(10**6, ranks=4))
    assert us == pytest.approx((1100 * 0.75 / 0.5 + MESSAGE_US) * 2)
    assert four.log_error("step") > two.log_error("step")


def test_an_update_of_a_list_costs_a_share_per_tensor_and_the_rest_per_element() -> None:
    lists = [
        row("optimizer", "_foreach_add", [n, tensors], us, bytes_moved=12 * n)
        for n, tensors, us in ((1000, 10, 20.0), (10**6, 40, 500.0))
    ]
    found = rates(times() | {"operators": [*times()["operators"], *lists]})
    update = replace(moved(6), kind="optimizer", name="_foreach_add", dtype="float32")
    for shape, us in (
        ((1000, 10), 20.0),
        ((1000, 30), 60.0),
        ((1000,), 20.0),
        ((10**6, 40), 80.0 + 480.0),
        ((10**6, 1), 2.0 + 480.0),
    ):
        asked = replace(update, shape=shape)
        assert found.operator_us(asked) == pytest.approx(us * IN_STEPS), shape
    assert found.operator_us(replace(update, count=0)) == 0.0
    assert found.compiled_dispatch() == 0.26


def test_other_numbers_of_ranks_take_the_share_that_each_sends() -> None:
    found = rates(times(ranks=2), timed=2, used=2)
    for ranks, share in ((1, None), (2, 1.0), (4, 1.5), (8, 1.75)):
        us = found.collective_us(exchange(10**6, ranks=ranks))
        expected = 0.0 if share is None else 1100.0 * share + MESSAGE_US
        assert us == pytest.approx(expected), ranks
    with pytest.raises(ValueError, match="all_to_all"):
        found.collective_us(exchange(10**6, "all_to_all", ranks=2))
