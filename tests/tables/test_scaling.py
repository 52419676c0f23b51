import math

import numpy as np
import pytest
from pandas import Series
from scipy.stats import ttest_1samp

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.scaling import (
    exposed_communication,
    scaling_efficiency,
)
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import holm

SHARED = "ranks shared CPU cores"


def point(cell, world, speed, images, block="b0", **kwargs):
    size = {"world_size": world, "ranks_per_node": world, "resources.ranks_per_node": world}
    return run(cell, block, speed, images_per_step=images, **size, **kwargs)


def test_strong_scaling_keeps_the_images_of_a_step():
    runs = table(point("n1", 1, 100, 64), point("n2", 2, 180, 64), point("n4", 4, 300, 64))
    curve = scaling_efficiency(runs, {})
    assert curve["scaling"].unique().tolist() == ["strong"]
    assert curve["efficiency"].tolist() == pytest.approx([1.0, 0.9, 0.75])
    # T(n0) n0 / (n T(n)), systems definition of strong scaling
    times = 64 / curve["images_per_second"]
    assert curve["efficiency"].tolist() == pytest.approx(
        [times[0] * 1 / (n * t) for n, t in zip([1, 2, 4], times, strict=True)]
    )


def test_weak_scaling_keeps_the_images_of_a_rank():
    runs = table(point("n2", 2, 200, 128), point("n8", 8, 752, 512))
    curve = scaling_efficiency(runs, {})
    assert curve["scaling"].tolist() == ["weak", "weak"]
    assert curve["reference_world_size"].tolist() == [2, 2]
    assert curve["efficiency"].iloc[1] == pytest.approx(0.94)


def test_points_of_one_block_are_paired_and_get_an_interval():
    runs = table(
        *[point("n1", 1, 100 * pace, 64, f"b{i}") for i, pace in enumerate([1, 0.5, 2])],
        *[point("n2", 2, 160 * pace, 64, f"b{i}") for i, pace in enumerate([1, 0.5, 2])],
    )
    last = scaling_efficiency(runs, {}).iloc[-1]
    assert (last["efficiency"], last["efficiency_low"]) == pytest.approx((0.8, 0.8))
    assert last["efficiency_blocks"] == 3


def test_points_that_shared_no_block_have_no_interval_and_say_so():
    runs = table(
        *[point("n1", 1, s, 64, f"a{i}") for i, s in enumerate([100, 102, 98])],
        *[point("n2", 2, s, 64, f"b{i}") for i, s in enumerate([150, 153, 147])],
    )
    first, last = scaling_efficiency(runs, {}).to_dict("records")
    assert last["efficiency"] == pytest.approx(0.75)
    assert math.isnan(last["efficiency_low"])
    assert math.isnan(last["efficiency_high"])
    assert last["efficiency_blocks"] == 0
    assert first["efficiency_note"] == ""
    assert last["efficiency_note"].startswith("unpaired")


def test_each_technique_has_its_own_curve_with_its_speedup_at_the_same_size():
    runs = table(
        point("d1", 1, 100, 64), point("d2", 2, 190, 64),
        point("o1", 1, 150, 64, precision="O1"), point("o2", 2, 240, 64, precision="O1"),
    )  # fmt: skip
    curve = scaling_efficiency(runs, {"o1": "d1", "o2": "d2"}).set_index("cell_id")
    assert curve["curve"].nunique() == 2
    assert curve.loc["o2", "efficiency"] == pytest.approx(0.8)
    assert curve.loc["o2", "speedup"] == pytest.approx(240 / 190)


def test_oversubscribed_points_keep_their_flag_and_failed_ones_are_out():
    runs = table(
        point("n1", 1, 100, 64),
        point("n2", 2, 110, 64, validity={"oversubscribed": True}),
        point("n4", 4, 0, 64, status=Status.out_of_memory, reason="no room"),
    )
    curve = scaling_efficiency(runs, {})
    assert curve["oversubscribed"].tolist() == [False, True]


def test_one_size_is_no_curve():
    assert scaling_efficiency(table(point("n1", 1, 100, 64)), {}).empty


def test_two_devices_are_not_one_curve():
    runs = table(point("n1", 1, 100, 64), point("n2", 2, 100, 64, environment={"device": "H200"}))
    with pytest.raises(VitsweepError, match="different devices"):
        scaling_efficiency(runs, {})


def on_cores(world, threads, speed, block="b0", cell="", cores=4, **kwargs):
    resources = {"resources.threads_per_rank": threads, "resources.cores_per_node": cores}
    return point(cell or f"n{world}x{threads}", world, speed, 64, block, **resources | kwargs)


def test_a_point_with_other_cores_per_rank_has_no_efficiency_and_says_why():
    """One rank on all cores and two with half each: nothing is lost to communication."""
    sizes = [(1, 4, 100.0), (2, 2, 101.0), (4, 1, 99.0)]
    rows = [
        on_cores(*size, f"b{i}", metrics={"communication_ms": 10.0})
        for size in sizes
        for i in range(3)
    ]
    curve = scaling_efficiency(table(*rows), {})
    assert curve["images_per_second"].tolist() == pytest.approx([100, 101, 99])
    assert curve["efficiency"].notna().tolist() == [True, False, False]
    assert curve[["efficiency_low", "efficiency_high"]].iloc[1:].isna().all(axis=None)
    other = [
        say("point_differs", here=f"{n} per rank", there=4, ranks="1 rank")
        for n in ("2 cores", "1 core")
    ]
    assert curve["efficiency_note"].tolist() == ["", *other]
    assert exposed_communication(table(*rows), {}).empty


def test_points_of_equal_cores_and_those_of_gpus_keep_their_efficiency():
    sizes = [(1, 1, 100.0), (2, 1, 190.0), (4, 1, 340.0)]
    curve = scaling_efficiency(table(*[on_cores(*size) for size in sizes]), {})
    assert curve["efficiency"].tolist() == pytest.approx([1, 0.95, 0.85])
    gpu = {"environment": {"device_type": "cuda", "device": "H100"}}
    curve = scaling_efficiency(
        table(on_cores(1, 4, 100.0, **gpu), on_cores(2, 2, 190.0, **gpu)), {}
    )
    assert curve["efficiency"].tolist() == pytest.approx([1, 0.95])


def test_each_number_of_threads_has_a_curve_where_it_is_varied():
    """The fastest point of each world would compare four threads with one."""
    sizes = [(1, 1, 100.0), (1, 4, 350.0), (2, 1, 190.0), (4, 1, 360.0)]
    curve = scaling_efficiency(table(*[on_cores(*size) for size in sizes]), {})
    assert curve["cell_id"].tolist() == ["n1x1", "n2x1", "n4x1"]
    assert curve["efficiency"].tolist() == pytest.approx([1, 0.95, 0.9])


def test_ranks_that_share_cores_another_torch_are_named():
    """Of planned cores the number is known; where a machine gave fewer, only that they were shared."""
    rows = [
        on_cores(1, 1, 100.0, cores=2),
        on_cores(4, 1, 110.0, cores=2),
        on_cores(2, 1, 110.0, validity={"oversubscribed": True}),
        on_cores(3, 1, 110.0, cell="h", environment={"torch": "2.12.0"}),
    ]
    curve = scaling_efficiency(table(*rows), {})
    assert curve["efficiency_note"].tolist() == [
        "",
        SHARED,
        say("point_differs", here="PyTorch 2.12.0", there="2.13.0", ranks="1 rank"),
        say("point_differs", here="0.5 cores per rank", there=1, ranks="1 rank"),
    ]
    assert curve["efficiency"].notna().tolist() == [True, False, False, False]
    shared = [on_cores(n, 1, 90.0, validity={"oversubscribed": n == 1}) for n in (1, 2)]
    note = scaling_efficiency(table(*shared), {})["efficiency_note"].tolist()
    assert note == [SHARED, SHARED]


def test_rows_whose_key_is_not_known_raise_nothing():
    runs = table(on_cores(1, 1, 100.0), on_cores(2, 1, 190.0))
    assert len(scaling_efficiency(runs.assign(cell_id=[3.0, 4.0]), {})) == 2


def test_the_number_of_blocks_does_not_part_a_curve():
    rows = [on_cores(n, 1, 90.0 * n, **{"measurement.blocks": 2 + n}) for n in (1, 2)]
    assert scaling_efficiency(table(*rows), {})["efficiency"].tolist() == pytest.approx([1, 1])


def test_the_efficiencies_of_a_command_are_one_family():
    """Each interval is that of Holm's level among all of its command, whichever curve they are of."""
    generator = np.random.default_rng(0)
    rows = [
        point(f"{kind}{n}", n, 100 * n * np.exp(loss * (n > 1) + generator.normal(0, 0.01)), 64, f"b{b}",
              precision=kind)
        for b in range(5) for kind, loss in (("fp32", -0.02), ("O1", -0.3)) for n in (1, 2, 4)
    ]  # fmt: skip
    runs, every = table(*rows), {r.cell_id for r in rows}
    for families, size in (([], 4), ([every], 4), ([every, {"O11", "O12", "O14"}], 2)):
        curve = scaling_efficiency(runs, {}, None, families).set_index("cell_id")
        assert curve.loc["O12", "efficiency_family_size"] == size
        p_values = {}
        for cell in ("fp322", "fp324", "O12", "O14") if size == 4 else ("O12", "O14"):
            logs = np.log(
                [
                    by_block[cell] / by_block[f"{cell[:-1]}1"] / int(cell[-1])
                    for _, by_block in runs.pivot_table(
                        index="block", columns="cell_id", values="images_per_second"
                    ).iterrows()
                ]
            )
            p_values[cell] = ttest_1samp(logs, 0.0).pvalue
        wanted = holm(Series(p_values))
        found = curve.loc[[*p_values], "efficiency_p_holm"]
        assert found.to_dict() == pytest.approx(wanted.to_dict(), rel=1e-6)
        low, high = curve["efficiency_claim_low"], curve["efficiency_claim_high"]
        excludes = (low > 1) | (high < 1)
        assert excludes[[*p_values]].tolist() == (wanted < 0.05).tolist()
        assert (low <= curve["efficiency_low"] * (1 + 1e-12))[[*p_values]].all()
        assert curve.loc[["O11", "fp321"], "efficiency_p_holm"].isna().all()
