import math

import pytest

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.scaling import scaling_efficiency


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
