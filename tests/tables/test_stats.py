"""Estimates, intervals and tests, against numbers that were worked out by hand."""

from math import exp, inf, isnan, log, nan, sqrt
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame, Series
from scipy import special

from vitsweep.tables import stats
from vitsweep.tables.stats import Claim, Sample

T4, T4_90, T2 = 2.7764451, 2.1318468, 4.3026527
"""Quantiles of Student's t: 97.5 % and 95 % of 4 degrees, 97.5 % of 2."""


def close(*wanted: float) -> Any:
    return pytest.approx(wanted, rel=1e-5, nan_ok=True)


def test_students_t() -> None:
    assert stats.half_width(2.0, 4.0) == pytest.approx(2 * T4)
    assert stats.half_width(1.0, 4.0, 0.1) == pytest.approx(T4_90)
    p = stats.two_sided([1.0, -1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.0, 0.0], 4.0)
    assert tuple(p) == close(0.1161165, 0.1161165, 1, 0, 1)
    assert stats.mean_interval(np.array([1.0, 2, 3])) == close(
        2, 2 - T2 / sqrt(3), 2 + T2 / sqrt(3)
    )
    assert stats.mean_interval(np.array([1.0, 2])) == close(1.5, nan, nan)
    assert stats.mean_interval(np.array([])) == close(nan, nan, nan)
    for power in (0.8, 0.95):
        distance = stats.noncentrality(4.0, 0.05, power)
        assert special.nctdtr(4.0, distance, T4) == pytest.approx(1 - power)


def test_the_interval_of_any_look() -> None:
    """Of 5 values R = (5.1 / (0.1 * 0.05^2))^(1/5) = 7.27651."""
    factor = sqrt(5.1 * 6.27651 / (5.1 - 0.727651)) * sqrt(4 / 5)
    assert stats.any_look_half_width(2.0, 5) == pytest.approx(2 * factor, rel=1e-5)
    wider = (5.1 / (0.1 * 0.01**2)) ** 0.2
    factor = sqrt(5.1 * (wider - 1) / (5.1 - 0.1 * wider)) * sqrt(4 / 5)
    assert stats.any_look_half_width(1.0, 5, 0.01) == pytest.approx(factor)
    assert list(np.isfinite(stats.any_look_half_width(1.0, [1, 2, 3]))) == [False, False, True]
    # S = 4 and V = 4.75 of four values with mean 1: log B = log(0.1 / 4.1) / 2 - 2 log(1 - 16 / 19.475)
    evidence = log(0.1 / 4.1) / 2 - 2 * log(1 - 16 / 19.475)
    assert stats.log_evidence(1.0, 0.5, 4) == pytest.approx(evidence)
    p = stats.any_look_p_value([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], 4)
    assert tuple(p) == close(exp(-evidence), 1, 1)


WAVE = np.array([[1.0, 1, -1, -1, 1, 1, -1, -1]])
"""Neighbours have products 1, -1, 1, -1, 1, -1, 1."""


def test_the_correlation_in_time() -> None:
    assert stats.correlation_in_time([WAVE]) == pytest.approx((1 / 8 * 8 + 1) / 5)
    half = np.vstack([WAVE[:, :4]] * 2)  # products 1, -1, 1 of each row
    assert stats.correlation_in_time([WAVE, half]) == pytest.approx(
        (3 / 16 * 16 / 3 + 1) / (16 / 3 - 3)
    )
    assert stats.correlation_in_time([np.array([[1.0, -1, 1, -1]])]) == -0.99
    assert stats.correlation_in_time([np.ones((1, 4))]) == 0.99
    assert stats.correlation_in_time([np.zeros((1, 4))]) == 0
    found, low, high = stats.correlation_interval([WAVE])
    half_width = 1.96 / sqrt(5)
    ends = [np.tanh(np.arctanh(0.4) + side * half_width) for side in (-1, 1)]
    assert (found, low, high) == close(0.4, *ends)
    _, low, high = stats.correlation_interval([WAVE, WAVE[:, :4]])
    assert (np.arctanh(high) - np.arctanh(low)) / 2 == pytest.approx(1.96 / 3)
    _, low, high = stats.correlation_interval([WAVE[:, :4] * [[1, 1, 1, 0.5]]])
    assert (np.arctanh(high) - np.arctanh(low)) / 2 == pytest.approx(1.96)


def test_correlated_blocks_widen_an_interval_from_12_on() -> None:
    assert stats.mean_variance_factor(0.5, 3) == pytest.approx(1 + 2 * (2 / 3 * 0.5 + 1 / 3 * 0.25))
    assert stats.mean_variance_factor(0.5, 1) == 1
    upper = np.tanh(np.arctanh(0.3) + 0.5 / 3)
    wanted = sqrt(stats.mean_variance_factor(float(upper), 12))
    assert [stats.widening(0.3, n) for n in (11, 12)] == pytest.approx([1, wanted])
    assert wanted > 1.4
    assert stats.widening(-0.9, 12) == 1
    slow = np.sin(np.arange(12) / 2) + 3
    alone = stats.correlation_in_time([(slow - slow.mean())[None]])
    factor = stats.widening(alone, 12)
    assert factor > 1.5
    assert [stats.spread_factor(slow[:n]) for n in (11, 12)] == pytest.approx([1, factor])
    assert stats.spread(slow) == pytest.approx(slow.std(ddof=1) * factor)
    table = DataFrame({"cell": ["a"] * 12 + ["b"] * 3, "log": [*slow, 1.0, 2.0, 3.0]})
    found = stats.moments(table.groupby("cell")["log"])
    assert tuple(found.loc["a"]) == close(slow.mean(), slow.var(ddof=1) * factor**2, 12)
    assert tuple(found.loc["b"]) == close(2, 1, 3)


def test_estimates_of_log_ratios() -> None:
    logs = {
        "a": [0.1, 0.2, 0.3],
        "b": [0.1, 0.2],
        "looked": [0.1, 0.2, 0.3, 0.2],
        "same": [1e-12] * 3,
    }
    table = DataFrame([{"cell_id": c, "log_ratio": x} for c, some in logs.items() for x in some])
    table["any_look"] = table["cell_id"].eq("looked") & table["log_ratio"].eq(0.3)
    found = stats.estimate(table).set_index("cell_id")
    assert found["num_blocks"].tolist() == [3, 2, 4, 3]
    half = T2 * 0.1 / sqrt(3)
    assert tuple(found.loc["a", "speedup":"block_noise"]) == close(
        exp(0.2), exp(0.2 - half), exp(0.2 + half), 0.1
    )
    assert found.loc["a", "p_value"] == pytest.approx(stats.two_sided(0.2, 0.1 / sqrt(3), 2.0))
    assert tuple(found.loc["b"]) == close(2, exp(0.15), nan, nan, 0.1 / sqrt(2), nan)
    spread = np.std(logs["looked"], ddof=1)
    half = stats.any_look_half_width(spread, 4)
    assert tuple(found.loc["looked", "speedup":"speedup_high"]) == close(
        exp(0.2), exp(0.2 - half), exp(0.2 + half)
    )
    assert found.loc["looked", "p_value"] == pytest.approx(stats.any_look_p_value(0.2, spread, 4))
    assert tuple(found.loc["same", "speedup":"speedup_high"]) == (1, 1, 1)
    assert found.loc["same", "p_value"] == 1
    assert stats.any_look_keys(table) == {"looked"}
    assert stats.any_look_keys(table.drop(columns="any_look")) == set()
    assert stats.samples(table[:3]) == {"a": Sample(pytest.approx(0.2), pytest.approx(0.01), 3)}


def test_holms_procedure_and_the_level_of_each_test() -> None:
    p, levels = stats.adjusted(np.array([0.03, nan, 0.01, 0.6, 0.7]))
    assert tuple(p) == close(0.09, nan, 0.04, 1, 1)
    assert tuple(levels) == close(0.05 / 3, nan, 0.05 / 4, 0.05 / 3, 0.05 / 3)
    p, levels = stats.adjusted(np.array([0.01, 0.02]))
    assert (tuple(p), tuple(levels)) == (close(0.02, 0.02), close(0.025, 0.05))
    p, _ = stats.adjusted(np.array([0.02, 0.021]))
    assert tuple(p) == close(0.04, 0.04)
    p, levels = stats.adjusted(np.array([0.05]))
    assert (tuple(p), tuple(levels)) == (close(0.05), close(0.05))
    assert stats.holm(Series([0.02, 0.5], ["x", "y"])).to_dict() == {"x": 0.04, "y": 0.5}


def test_an_interval_at_another_level() -> None:
    table = DataFrame(
        {"speedup": [2.0] * 3, "speedup_high": [3.0, 3.0, inf], "num_blocks": [5] * 3}
    )
    found = stats.interval(table, 0.1)
    half = log(1.5) * T4_90 / T4
    assert tuple(found.loc[0]) == close(2 * exp(-half), 2 * exp(half))
    assert tuple(found.loc[2]) == close(nan, nan)
    looked = stats.interval(table.assign(any_look=[True, False, None], n=[5, 5, 5]), 0.01, "n")
    times = stats.any_look_half_width(1.0, 5, 0.01) / stats.any_look_half_width(1.0, 5)
    assert looked.loc[0, "high"] == pytest.approx(2 * exp(log(1.5) * times))
    assert looked.loc[1, "high"] == pytest.approx(2 * exp(log(1.5) * 4.604095 / T4))


def test_a_contrast_is_welchs() -> None:
    known = {
        "a": Sample(0.2, 0.04, 4),
        "b": Sample(0.1, 0.01, 5),
        "c": Sample(0.5, 0.0, 2),
        "d": Sample(0.3, 0.0, 3),
    }
    row = stats.contrast({"a": 1.0, "b": -1.0}, known)
    error, degrees = sqrt(0.01 + 0.002), 0.012**2 / (0.01**2 / 3 + 0.002**2 / 4)
    half = float(stats.half_width(error, degrees))
    assert (row["num_blocks"], row["speedup"]) == close(4, exp(0.1))
    assert (row["speedup_low"], row["speedup_high"]) == close(exp(0.1 - half), exp(0.1 + half))
    assert row["p_value"] == pytest.approx(float(stats.two_sided(0.1, error, degrees)))
    weighted = stats.contrast({"a": 2.0, "b": -1.0}, known)
    assert weighted["speedup"] == pytest.approx(exp(0.3))
    assert stats._error({"a": 2.0, "b": -1.0}, {k: known[k] for k in "ab"})[0] == pytest.approx(
        sqrt(0.042)
    )
    few = stats.contrast({"a": 1.0, "c": -1.0}, known)
    assert few["speedup"] == pytest.approx(exp(-0.3))
    assert few["num_blocks"] == 2
    assert isnan(few["speedup_low"])
    assert isnan(few["p_value"])
    still = stats.contrast({"d": 1.0}, known)
    assert tuple(still.values()) == close(3, exp(0.3), exp(0.3), exp(0.3), 0)
    for weights, baseline, blocks in (
        ({"a": 1.0, "x": -1.0}, None, 0),
        ({"a": 1.0, "x": -1.0}, "x", 4),
        ({"x": 1.0}, "x", 0),
    ):
        found = stats.contrast(weights, known, baseline)
        assert found["num_blocks"] == blocks
        assert isnan(found["speedup"]) == (blocks == 0)


def test_the_first_claim_that_holds_is_made() -> None:
    row = {"speedup": 1.2, "speedup_low": 1.1, "speedup_high": 1.3, "p_value": 0.01, "p_holm": 0.02}
    row |= {
        "num_blocks": 3,
        "cell_id": "a",
        "baseline_cell_id": "b",
        "_short": "",
        "_survivors": False,
    }
    for claim, facts in (
        (Claim.faster, {}),
        (Claim.baseline, {"cell_id": "b", "speedup": nan}),
        (Claim.nothing, {"speedup": nan, "_short": Claim.screened}),
        (Claim.screened, {"_short": Claim.screened, "num_blocks": 0}),
        (Claim.too_few_blocks, {"num_blocks": 2}),
        (Claim.missing_blocks, {"_survivors": True}),
        (Claim.no_difference_shown, {"_survivors": True, "p_holm": 0.05}),
        (Claim.no_difference_shown, {"_survivors": True, "p_value": 0.05, "p_holm": 0.05}),
        (
            Claim.equal,
            {
                "speedup": 1.0,
                "speedup_low": 1.0,
                "speedup_high": 1.0,
                "p_value": 1.0,
                "p_holm": 1.0,
            },
        ),
        (Claim.slower, {"speedup": 0.9}),
        (Claim.slower, {"speedup": 1.0}),
        (Claim.no_difference_shown, {"p_holm": 0.05}),
        (Claim.no_difference_shown, {"p_holm": 0.05, "speedup": 0.9}),
        (Claim.no_difference_shown, {"p_value": 0.05, "p_holm": 0.05}),
        (Claim.no_difference_shown, {"speedup_low": 1.0, "p_value": 0.05, "p_holm": 0.05}),
    ):
        assert stats.claims(DataFrame([row | facts]))[0] == claim, facts
    plain = DataFrame([row]).drop(columns=["_short", "_survivors"])
    assert stats.claims(plain)[0] == Claim.faster


def test_any_look_intervals_end_from_a_least_number_of_blocks_on() -> None:
    for cells, least in (
        (1, 3),
        (2, 4),
        (13, 4),
        (14, 5),
        (130, 5),
        (131, 6),
        (1453, 6),
        (1454, 7),
    ):
        assert stats.least_blocks(cells) == least
        level = stats.LEVEL / cells
        assert np.isinf(stats.any_look_half_width(1.0, least - 1, level))
    for blocks, wider in ((3, 3.07), (5, 1.95), (20, 1.82)):
        of_student = stats.half_width(blocks**-0.5, blocks - 1.0)
        assert stats.any_look_half_width(1.0, blocks) / of_student == pytest.approx(
            wider, abs=0.005
        )


def test_the_cheapest_assignment() -> None:
    rows, columns = stats.assigned(np.array([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0]]))
    assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])
