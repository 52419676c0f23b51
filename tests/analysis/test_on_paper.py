"""Scaling on paper: predictions at sizes that nobody here has, beside the published points."""

from analysis.on_paper import META, META_CELLS, predicted


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
