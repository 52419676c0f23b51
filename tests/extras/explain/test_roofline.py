"""Points of the roofline by hand; limits with their source; what is unknown stays empty."""

import math

import pytest

from tests.builders import run, table
from tests.said import opening
from tests.traced import METRICS
from vitsweep.errors import VitsweepError
from vitsweep.extras.explain.roofline import cell_roofline
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells


def points(device="NVIDIA H200", dtype="bfloat16", spec=None, **metrics):
    environment = {"device": device, "compute_dtype": dtype, "peak_source": "NVIDIA H200 datasheet"}
    size = {"images_per_step": 128, "world_size": 2} | (spec or {})
    record = run("a", metrics=METRICS | metrics, environment=environment, **size)
    return placed(cells(table(record), {})).causes.set_index("phase")


def placed(found):
    return cell_roofline("a", found.iloc[0])


def test_three_phases_by_hand():
    found = points()
    assert found.index.tolist() == ["forward", "backward", "optimizer"]
    forward, backward, optimizer = (found.loc[p] for p in found.index)
    assert forward["flops"] == pytest.approx(1.2e11 / 3 * 64)
    assert forward["bytes_at_least"] == pytest.approx(2e8 + 4 * 2**30)
    assert forward["tflops_per_rank"] == pytest.approx(1.2e11 / 3 * 64 / 0.020 / 1e12)
    assert backward["flops"] == pytest.approx(2 * forward["flops"])
    assert backward["bytes_at_least"] == pytest.approx(4e8 + 4 * 2**30)
    assert optimizer["flops"] == pytest.approx(12e8)
    assert optimizer["bytes_at_least"] == pytest.approx((0.8 + 0.4 + 1.6) * 2**30)
    assert forward["bytes_from"] == "parameters and activations"


def test_the_limits_are_published_ones():
    forward = points().loc["forward"]
    assert forward["limit_tflops"] == 989.5
    assert forward["limit_source"] == "NVIDIA H200 datasheet"
    assert forward["limit_gb_per_s"] == 4800.0
    assert "H200 datasheet" in forward["bandwidth_source"]


def test_the_optimizer_is_below_the_slope_and_the_forward_pass_below_the_flat_roof():
    found = points()
    optimizer, forward = found.loc["optimizer"], found.loc["forward"]
    assert optimizer["attainable_tflops"] == pytest.approx(
        optimizer["intensity_flop_per_byte"] * 4.8
    )
    assert forward["attainable_tflops"] == pytest.approx(989.5)
    assert forward["share_of_attainable"] == pytest.approx(forward["tflops_per_rank"] / 989.5)


@pytest.mark.parametrize("device", ["AMD EPYC 7B13", "NVIDIA H200 MIG 1g.18gb", "NVIDIA B100"])
def test_a_device_nobody_published_has_points_without_limits(device):
    found = points(device, peak_tflops=None)
    assert len(found) == 3
    assert found["limit_tflops"].isna().all()
    assert found["limit_gb_per_s"].isna().all()
    assert found["attainable_tflops"].isna().all()


def test_without_counted_activations_the_bound_is_the_parameters_and_says_so():
    forward = points(activation_gib=None).loc["forward"]
    assert forward["bytes_at_least"] == pytest.approx(2e8)
    assert forward["bytes_from"] == "parameters"


def test_micro_batches_read_the_parameters_again_and_tensor_parallel_ranks_a_part():
    forward = points(spec={"accumulation_steps": 4, "mesh.tensor": 2}).loc["forward"]
    assert forward["bytes_at_least"] == pytest.approx(4 * (1e8 + 4 * 2**30))


def test_other_optimizers_and_cells_without_counts_have_no_point():
    assert points(spec={"optimizer": "sgd"}).index.tolist() == ["forward", "backward"]
    assert points(forward_ms=None).index.tolist() == ["backward", "optimizer"]
    assert points(model_flops_per_image=float("nan")).index.tolist() == ["optimizer"]


def test_a_cell_without_a_point_is_refused_by_name():
    failed = run("a", status=Status.failed, reason="...")
    counted = [run("a"), run("a", metrics=METRICS | {"num_parameters": None})]
    for record in (failed, *counted):
        with pytest.raises(VitsweepError, match=r"\ba\b.*roofline"):
            placed(cells(table(record), {}))


def test_the_picture_has_a_bar_per_phase_and_the_attainable_rate_next_to_it():
    record = run("a", metrics=METRICS, environment={"device": "NVIDIA H200"})
    found = placed(cells(table(record), {}))
    axes = found.figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["forward", "backward", "optimizer"]
    assert sum(line.get_marker() == "o" and len(line.get_xdata()) > 0 for line in axes.lines) == 3
    assert "4.8 TB/s" in found.notes[0]
    unknown = run("a", metrics=METRICS | {"peak_tflops": None}, environment={"device": "AMD EPYC"})
    found = placed(cells(table(unknown), {}))
    [note] = found.notes
    assert note.startswith(opening("roofs"))
    assert note.count("no ") == 2
    assert not found.sentence


def test_infinite_times_are_no_time():
    assert "forward" not in points(forward_ms=math.inf).index
