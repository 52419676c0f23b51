"""Rates of a processor: interpolated between the operators that were timed on it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.extras.predict.traces import exchange, moved, product
from vitsweep.extras.predict.measured_rates import IN_STEPS, MESSAGE_US, MeasuredRates
from vitsweep.extras.predict.timed_operators import Times
from vitsweep.rates.profile import Curve

GFLOPS, GB_S = 100, 10


def row(kind: str, name: str, shape: list[int], us: float, **facts: Any) -> dict[str, Any]:
    known = {"kind": kind, "name": name, "dtype": "float32", "shape": shape, "us": us}
    return {**known, "backward": False, "bytes_moved": 0, **facts}


def times(ranks: int = 1) -> Times:
    """A machine of 100 GFLOP/s and 10 GB/s in steps, whose all-reduce moves 1 GB/s after 100 us."""
    products = [
        row("matmul", name, [1, m, n, k], 2 * m * n * k / GFLOPS / 1e3 / IN_STEPS)
        for m in (64, 1024)
        for n in (128, 1024)
        for k in (128, 1024)
        for name in ("addmm", "mm.t")
    ]
    adds = [
        row("memory", "add", [n], 12 * n / GB_S / 1e3 / IN_STEPS, bytes_moved=12 * n)
        for n in (1000, 10**6)
    ]
    sent = [
        {"name": "all_reduce", "dtype": "float32", "bytes": n, "ranks": ranks, "us": 100 + n / 1e3}
        for n in (1000, 10**6, 10**8)
    ]
    return {"operators": products + adds, "collectives": sent if ranks > 1 else []}


def rates(of: Times, timed: int = 1, used: int | None = None) -> MeasuredRates:
    return MeasuredRates(
        of, timed=(timed, 1), used=(used or timed, 1), cores=2, device="a processor"
    )


def test_shapes_between_measured_ones_have_their_rate() -> None:
    found = rates(times())
    between = replace(product(300, 300, 300), dtype="float32")
    assert found.operator_us(between) == pytest.approx(between.flops / GFLOPS / 1e3, rel=0.01)
    unknown_name = replace(moved(60_000), name="never_measured", dtype="float32")
    assert found.operator_us(unknown_name) == pytest.approx(60_000 / GB_S / 1e3, rel=0.01)


def test_one_disturbed_point_does_not_explode_beyond_the_measured_ones() -> None:
    """Time grows with the size at most in proportion, and does not shrink."""
    disturbed = Curve({256: 1.0, 8192: 10_000.0}, slope_ends=True)
    assert disturbed(81_920) == pytest.approx(100_000)
    assert Curve({256: 5.0, 8192: 1.0}, slope_ends=True)(81_920) == pytest.approx(1)


def test_products_of_the_backward_pass_have_rates_of_their_own() -> None:
    """Also where the tokens are fewer than rows and columns of the weight."""
    slow = [
        o | {"name": "mm", "us": 3 * o["us"], "dtype": dtype}
        for o in times()["operators"]
        if o["name"] == "addmm"
        for dtype in ("float32", "bfloat16")
    ]
    found = rates(times() | {"operators": [*times()["operators"], *slow]})
    few_tokens = product(68, 512, 2048, phase="backward")
    forward = product(68, 2048, 512)
    for operator, name, factor in ((few_tokens, "mm", 3), (forward, "addmm", 1)):
        us = found.operator_us(replace(operator, name=name, dtype="float32"))
        assert us == pytest.approx(factor * operator.flops / GFLOPS / 1e3, rel=0.01)
    assert found.operator_us(replace(few_tokens, name="mm", dtype="bfloat16")) > 0


def test_what_was_not_timed_in_a_format_has_no_time() -> None:
    attention = replace(product(1, 1, 1), kind="attention", shape=(2, 4, 64, 64, 32))
    for operator, what in ((product(64, 64, 64), "products"), (attention, "attention")):
        with pytest.raises(ValueError, match=f"{what} in bfloat16 were not timed"):
            rates(times()).operator_us(operator)


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
