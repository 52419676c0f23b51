import math

import pytest

from tests.builders import run, table
from vitsweep.charts.step import optimizer_steps
from vitsweep.tables.cells import cells
from vitsweep.tables.scaling import communication

per_chip = pytest.importorskip("analysis.meta_blog").per_chip
with_published_volumes = pytest.importorskip("analysis.dsp").with_published_volumes
memory_parts = pytest.importorskip("analysis.usp").memory_parts


def test_per_chip_is_relative_to_the_baseline_of_the_slowest_device():
    old, new = {"device": "V100"}, {"device": "A100"}
    runs = [
        ("v32", 100, old, "fp32"), ("v16", 200, old, "O2"),
        ("a32", 180, new, "fp32"), ("a16", 405, new, "O2"),
    ]  # fmt: skip
    both = cells(
        table(*[run(c, "b0", s, environment=e, precision=p) for c, s, e, p in runs]),
        {"v32": "v32", "v16": "v32", "a32": "a32", "a16": "a32"},
    )
    relative = per_chip(both).set_index("cell_id")["relative_throughput"]
    assert relative.to_dict() == pytest.approx({"v32": 1.0, "v16": 2.0, "a32": 1.8, "a16": 4.05})


def test_per_chip_counts_ranks_not_machines():
    both = cells(
        table(
            run("one", "b0", 100, world_size=1, environment={"device": "V100"}),
            run("eight", "b0", 1600, world_size=8, environment={"device": "A100"}),
        ),
        {},
    )
    found = per_chip(both)
    assert found["relative_throughput"].tolist() == pytest.approx([1.0, 2.0])
    assert found["images_per_rank"].tolist() == [64.0, 8.0]


def test_communication_sums_purposes_and_shows_the_paper_with_its_unit():
    sent = {"gradient_bytes_per_step": 1000.0, "activation_bytes_per_step": 600.0}
    runs = table(
        run("ring", metrics=sent, sequence_parallel="ring"),
        run("dsp", metrics=sent | {"activation_bytes_per_step": 200.0}, sequence_parallel="dsp"),
        run("plain", metrics={"gradient_bytes_per_step": 1000.0}),
    )
    rows = with_published_volumes(communication(cells(runs, {}))).set_index("cell_id")
    assert rows["bytes_per_step"].to_dict() == {"ring": 1600, "dsp": 1200, "plain": 1000}
    assert rows.loc["ring", "bytes_per_image"] == 1600 * 2 / 64
    assert rows.loc["dsp", "published_formula"] == "2M/N"
    assert "per device" in rows.loc["dsp", "published_unit"]
    assert rows.loc["ring", "published_unit"] == rows.loc["dsp", "published_unit"]
    assert rows["published_formula"].isna()["plain"]


def test_memory_stands_next_to_the_formulas_with_the_parts_of_one_rank_put_in():
    def held(parameters, gradients, state, activations):
        return {
            "parameter_gib": parameters, "gradient_gib": gradients,
            "optimizer_state_gib": state, "activation_gib": activations,
        }  # fmt: skip

    four = {"world_size": 4, "ranks_per_node": 4}
    runs = table(
        run("one", metrics=held(1.0, 1.0, 2.0, 8.0), world_size=1),
        run("zero1", metrics=held(1.0, 1.0, 0.6, 2.1), sharding="zero1", **four),
        run("tp", metrics=held(0.3, 0.3, 0.6, 3.0), tensor_parallel="megatron", **four),
        run("dsp", metrics=held(1.0, 1.0, 2.0, 2.0), sequence_parallel="dsp", **four),
        run("other", metrics=held(1.0, 1.0, 2.0, 2.0), num_tokens=99, **four),
    )
    rows = memory_parts(cells(runs, {})).set_index("cell_id")
    assert rows.loc["zero1", "published_system"] == "ZeRO1"
    assert rows.loc["zero1", "published_optimizer_state"] == "6P/N"
    assert rows.loc["zero1", "expected_optimizer_state_gib"] == 0.5
    assert rows.loc["zero1", "expected_parameter_gib"] == 1.0
    assert rows.loc["zero1", "expected_activation_gib"] == 2.0
    assert rows.loc["tp", "expected_gradient_gib"] == 0.25
    assert rows.loc["tp", "published_activations"] == "alpha*A"
    assert math.isnan(rows.loc["tp", "expected_activation_gib"]), "alpha is no number"
    assert rows["published_system"].isna()["dsp"], "the paper has no such row"
    assert math.isnan(rows.loc["other", "expected_parameter_gib"]), "no rank held this whole"
    assert "Table 2 (primary)" in rows.loc["zero1", "published_source"]


def test_without_measured_parts_there_is_no_table_of_memory():
    assert memory_parts(cells(table(run("a")), {})).empty


def test_the_loop_is_what_implementations_are_compared_with():
    def step(cell, optimizer, ms, **spec):
        return run(cell, metrics={"optimizer_ms": ms}, optimizer=optimizer, **spec)

    runs = table(
        step("al", "adamw_loop", 8.0), step("af", "adamw_foreach", 2.0),
        step("sl", "sgd_loop", 4.0), step("sf", "sgd_foreach", 1.0),
        step("only", "adamw_fused", 1.0, sharding="fsdp"),
    )  # fmt: skip
    rows = optimizer_steps(cells(runs, {})).set_index("cell_id")
    assert rows["step_ratio"].dropna().to_dict() == {"al": 1.0, "af": 4.0, "sl": 1.0, "sf": 4.0}
    assert rows.loc["af", ["family", "implementation"]].tolist() == ["adamw", "foreach"]
    assert rows.loc["af", "share_of_step"] == pytest.approx(2.0 / 640)
