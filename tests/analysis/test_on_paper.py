"""Scaling on paper: predictions at sizes that nobody here has, beside the published points."""

import pytest
from pandas import DataFrame

dsp_on_paper = pytest.importorskip("analysis.dsp_on_paper")  # without predictions there is none
on_paper = pytest.importorskip("analysis.on_paper")
cells, predicted = dsp_on_paper.cells, on_paper.predicted
META, META_CELLS = on_paper.META, on_paper.META_CELLS


def test_the_published_speedup_lies_near_the_prediction_over_tf32_and_far_from_float32() -> None:
    speeds = {}
    for name, overrides in META_CELLS.items():
        found = predicted(f"{META} {overrides}", nodes=8, per_node=8, hardware="a100_80g")
        assert found is not None
        assert found["low"] < found["images_per_second"] < found["high"]
        speeds[name] = found["images_per_second"]
    fast = speeds["FSDP, O1, foreach"]
    assert 1.4 < fast / speeds["DDP, TF32"] < 2.4
    assert fast / speeds["DDP, float32"] > 5


def test_what_cannot_run_there_has_no_point() -> None:
    assert predicted(f"{META} sharding=hsdp", nodes=1, per_node=1, hardware="a100_80g") is None


@pytest.mark.full
def test_at_the_papers_size_dsp_sends_two_thirds_of_ulysses_and_is_no_slower() -> None:
    """A third of the numbers, in float32: the residual stream under autocast; the rest is one gathering."""
    wanted = [
        (facts, overrides)
        for facts, overrides in cells()
        if (facts["study"], facts["temporal"], facts["sp"]) == ("dsp_end_to_end", 64, 8)
        and facts["method"] != "ring"
    ]
    table = dsp_on_paper.predicted("h100", wanted).set_index("method")
    assert (table["low"] < table["videos_per_second"]).all()
    share = table.loc["dsp", "activation_gb_sent"] / table.loc["ulysses", "activation_gb_sent"]
    assert 0.65 < share < 0.69
    assert table.loc["dsp", "videos_per_second"] >= table.loc["ulysses", "videos_per_second"]


def test_ratios_stand_next_to_the_points_of_the_figure_at_the_same_shape() -> None:
    rows = [
        {**facts, "videos_per_second": 1.0 + (facts["method"] == "dsp")} for facts, _ in cells()
    ]
    table = dsp_on_paper.ratios(DataFrame(rows))
    assert set(table["predicted"]) == {2.0}
    beside = table.dropna(subset=["published"])
    assert set(beside["study"]) == {"dsp_end_to_end"}
    assert len(beside) == 12
    assert beside["published"].between(1.4, 3.2).all()
