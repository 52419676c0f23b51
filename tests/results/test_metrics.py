"""Which columns have each property: tables, gates and charts follow them."""

from pandas import DataFrame

from vitsweep.results.metrics import COLUMNS, FLAGS, METRICS, own_metrics

SPEEDS = "images_per_second images_per_second_per_rank tokens_per_second"
METRICS_WITH = (
    ("positive", True, f"{SPEEDS} step_time_ms speedup speedup_low speedup_high"),
    ("spread", True, "images_per_second accuracy_top1 held_out_loss probe_top1 seconds_to_target"),
    ("gated", False, "throughput_spread speedup_low speedup_high"),
    ("mean", "geometric", f"{SPEEDS} step_time_ms seconds_to_target"),
    ("follows", "throughput", f"{SPEEDS} model_tflops_per_rank mfu"),
    ("follows", "step_time", "step_time_ms epoch_hours_imagenet1k"),
)
COLUMNS_WITH = (
    ("positive", True, "images_per_step world_size"),
    (
        "numbers", True, "blocks images_per_step accumulation_steps resolution_px num_tokens nodes "
        "ranks_per_node world_size p_value p_holm claim_low claim_high family_size num_pairs block_noise "
        "loss_tolerance gradient_tolerance",
    ),
)  # fmt: skip


def test_each_property_is_that_of_its_columns() -> None:
    for kinds, of in ((METRICS_WITH, METRICS), (COLUMNS_WITH, COLUMNS)):
        for name, value, columns in kinds:
            found = [c for c, kind in of.items() if getattr(kind, name) == value]  # type: ignore[attr-defined]
            assert found == columns.split(), name
    shares = {flag: kind.least_share for flag, kind in FLAGS.items() if kind.least_share}
    assert shares == {"drifting": 0.5, "uneven_steps": 0.5}


def test_a_metric_of_the_users_has_no_property_that_it_does_not_name() -> None:
    table = DataFrame({"own": [1.0]})
    assert own_metrics(table) == {}
    table.attrs["metrics"] = {"own": ["1", "Own", "higher", "as I say"]}
    [metric] = own_metrics(table).values()
    assert (metric.positive, metric.spread, metric.gated) == (False, False, True)
    assert (metric.follows, metric.mean, metric.heading) == (None, "arithmetic", "")
    assert (metric.axis_label, METRICS["step_time_ms"].axis_label) == ("Own", "Step time (ms)")
