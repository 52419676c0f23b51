import numpy as np
import pytest
from scipy import stats

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.report.gate import gate
from vitsweep.results.record import Status


def side(**speeds):
    return table(
        *[
            run(cell, f"b{i}", speed, precision=cell)
            for cell, values in speeds.items()
            for i, speed in enumerate(values)
        ]
    )


def one(result, cell):
    return result.rows.set_index("cell_id").loc[cell]


KEPT = side(fp32=[100, 101, 99, 100], O1=[150, 151, 149, 150])


def test_the_same_numbers_pass():
    result = gate(KEPT, KEPT)
    assert result.passed
    assert one(result, "O1")["verdict"] == "no difference shown"


def test_a_regression_beyond_noise_and_tolerance_fails_and_says_why():
    result = gate(side(fp32=[100, 101, 99, 100], O1=[130, 131, 129, 130]), KEPT)
    assert not result.passed
    assert one(result, "O1")["verdict"] == "slower beyond the tolerance"
    assert result.sentences[0].startswith("O1 (O1): 0.87x the kept throughput, interval [0.8")
    assert "accepted from 0.95" in result.sentences[0]


def test_a_regression_inside_the_tolerance_passes():
    result = gate(side(O1=[146, 147, 145, 146]), KEPT)
    assert result.passed
    assert one(result, "O1")["verdict"] == "slower within the tolerance"


def test_a_large_drop_inside_the_noise_passes():
    assert gate(side(O1=[90, 180, 60, 140]), KEPT).passed


def test_the_interval_is_welchs():
    now = side(fp32=[90, 92, 91])
    logs = [np.log([90, 92, 91]), np.log([100, 101, 99, 100])]
    interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    row = one(gate(now, KEPT), "fp32")
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx(tuple(np.exp(interval)))


def test_many_cells_share_the_level():
    many = {f"p{i}": [100, 101, 99, 102] for i in range(20)}
    alone = gate(side(p0=[98, 99, 97, 98]), side(p0=many["p0"]))
    wide = gate(side(**many | {"p0": [98, 99, 97, 98]}), side(**many))
    assert one(wide, "p0")["ratio_high"] > one(alone, "p0")["ratio_high"]


def test_a_cell_that_ran_out_of_memory_since_fails():
    now = table(
        run("O1", status=Status.out_of_memory, reason="rank 0 has no room.", precision="O1")
    )
    result = gate(now, KEPT)
    assert not result.passed
    assert (
        result.sentences[0] == "O1 (O1) was measured and is now out of memory: rank 0 has no room."
    )


def test_cells_on_one_side_only_and_few_runs_never_fail():
    now = side(O1=[75, 75], bf16=[10, 10, 10])
    result = gate(now, KEPT)
    assert result.passed
    verdicts = result.rows.set_index("cell_id")["verdict"].to_dict()
    assert verdicts == {"O1": "too few runs", "bf16": "new", "fp32": "not in this sweep"}


def test_another_device_is_not_compared():
    now = table(
        *[run("O1", f"b{i}", 20, precision="O1", environment={"device": "H200"}) for i in range(3)]
    )
    result = gate(now, KEPT)
    assert result.passed
    assert "ran on H200, the baseline on AMD EPYC 7B13" in one(result, "O1")["reason"]


def test_nothing_in_common_and_a_wrong_tolerance_are_refused():
    with pytest.raises(VitsweepError, match="no cell in common"):
        gate(side(bf16=[1, 1, 1]), KEPT)
    with pytest.raises(VitsweepError, match=r"within 0 and 1; got 5"):
        gate(KEPT, KEPT, tolerance=5)


def test_equal_sweeps_fail_in_at_most_5_percent():
    generator = np.random.default_rng(1)
    failed = 0
    for _ in range(12):
        speeds = generator.lognormal(0, 0.02, (2, 5, 5))
        sides = [side(**{f"p{c}": list(100 * s) for c, s in enumerate(half)}) for half in speeds]
        failed += not gate(*sides, tolerance=0.0).passed
    assert failed <= 2
