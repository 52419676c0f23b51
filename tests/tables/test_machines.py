"""Two machines' folders in one table: rows are keyed by cell, sweep and device."""

import math

import pandas as pd
import pytest

from analysis import meta_blog
from analysis.cost import cost, epoch_hours
from tests.builders import from_runs, run, table
from tests.said import opening
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.effects import effects, waterfall
from vitsweep.tables.names import cell_names
from vitsweep.tables.render import cell_text
from vitsweep.tables.scaling import scaling_efficiency
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.sweep_tables import SweepTables

SETTINGS = {
    "base": {},
    "o1": {"precision": "O1"},
    "fsdp": {"sharding": "fsdp"},
    "both": {"precision": "O1", "sharding": "fsdp"},
}
SPEEDS = {
    "V100": {"base": 100, "o1": 130, "fsdp": 90, "both": 120},
    "A100": {"base": 400, "o1": 800, "fsdp": 400, "both": 900},
}
BASELINES: dict[str, str | None] = dict.fromkeys(SETTINGS, "base")


def machine(device: str, sweep: str, **cells: int):
    return [
        run(c, f"b{i}", speed, minute=i, sweep=sweep, environment={"device": device}, **SETTINGS[c])
        for c, speed in cells.items()
        for i in range(3)
    ]


def two_machines(same_sweep: bool = False):
    return table(
        *(r for d, s in SPEEDS.items() for r in machine(d, "one" if same_sweep else d, **s))
    )


@pytest.mark.parametrize("same_sweep", [False, True])
def test_a_cell_of_two_machines_is_two_rows_each_with_the_baseline_of_its_machine(same_sweep):
    rows = cells(two_machines(same_sweep), BASELINES)
    assert len(rows) == 8
    found = rows.set_index(["cell_id", "device"])
    for device, speeds in SPEEDS.items():
        for cell, speed in speeds.items():
            assert found.loc[(cell, device), "speedup"] == pytest.approx(speed / speeds["base"])
            assert found.loc[(cell, device), "images_per_second"] == pytest.approx(speed)
    assert set(rows["baseline_cell_id"]) == {"base"}
    over = speedup_over(two_machines(same_sweep), BASELINES)
    assert sorted(over["speedup"].round(3)) == sorted(rows["speedup"].round(3))


def test_every_table_takes_two_machines():
    runs = two_machines()
    rows = cells(runs, BASELINES)
    hours = epoch_hours(rows).assign(device=rows["device"]).set_index(["cell_id", "device"])
    assert hours.loc[("o1", "A100"), "baseline_epoch_hours"] == pytest.approx(
        hours.loc[("base", "A100"), "epoch_hours"]
    )
    assert cost(rows, 1.0, 1)["saved"].notna().all()
    chips = meta_blog.per_chip(rows).set_index(["cell_id", "device"])["relative_throughput"]
    assert chips["base", "A100"] == pytest.approx(4.0)  # a column of its own, never `speedup`
    steps = waterfall(runs, BASELINES)
    assert len(steps[steps["kind"] == "alone"]) == 4
    assert sorted(steps[steps["added"] == "precision=O1"]["speedup"].round(2))[:2] == [1.3, 1.3]
    together = effects(runs, BASELINES).query(
        "technique == 'precision=O1' and given == 'sharding=fsdp'"
    )
    assert dict(zip(together["device"], together["effect"], strict=True)) == pytest.approx(
        {"V100": 120 / 90, "A100": 900 / 400}, rel=1e-3
    )
    assert len(cell_text(rows)) == 8
    assert cell_names(rows).nunique() == 4
    for device in SPEEDS:
        one = runs[runs["device"] == device]
        assert scaling_efficiency(one, BASELINES).empty


OPTIMIZED = {
    "precision": "O1",
    "sharding": "fsdp",
    "optimizer": "adamw_foreach",
    "classifier": "pooled",
}


def chips(*devices: str, world_size: int = 1) -> SweepTables:
    """Two machines as in `+sweep=meta_chips`: a baseline, a part of the techniques, and all of them."""
    specs = {"base": {}, "part": {"sharding": "fsdp"}, "all": OPTIMIZED}
    runs = table(
        *(
            run(c, f"b{i}", 100 * (1 + place) * (1 + j), minute=i, sweep=f"chips_{d}",
                environment={"device": d}, world_size=world_size, **spec)
            for place, d in enumerate(devices)
            for j, (c, spec) in enumerate(specs.items())
            for i in range(3)
        )
    )  # fmt: skip
    baselines: dict[str, str | None] = dict.fromkeys(specs, "base")
    return from_runs(runs, baselines, cells(runs, baselines))


def test_the_study_of_metas_blog_takes_the_folders_of_two_machines():
    both = chips("NVIDIA V100", "NVIDIA A100")
    found = {name: table_of(both) for name, table_of in meta_blog.TABLES.items()}
    assert len(found["Techniques alone and cumulative"]) == 8
    measured = found["Per chip"].dropna(subset=["cell_id"])
    beside = measured[measured["published_value"].notna()]
    assert beside[["cell_id", "device"]].to_numpy().tolist() == [["all", "NVIDIA A100"]]
    assert beside["relative_throughput (no interval)"].tolist() == pytest.approx([6.0])
    other = meta_blog.chips(chips("NVIDIA H100", "NVIDIA A100"))
    assert other.dropna(subset=["cell_id"])["published_value"].isna().all()
    assert "4.05" in other["published_value"].tolist()  # in a row of its own


def test_the_published_speedup_on_64_gpus_stands_next_to_no_baseline_and_no_part_of_the_techniques():
    sweeps = [chips("NVIDIA A100", world_size=n) for n in (32, 64)]
    runs = pd.concat([
        s.runs.assign(cell_id=s.runs["cell_id"] + f"-{s.runs['world_size'].iloc[0]}") for s in sweeps
    ], ignore_index=True)  # fmt: skip
    baselines = {c: f"base-{c.partition('-')[2]}" for c in runs["cell_id"].unique()}
    sweep = from_runs(runs, dict(baselines), cells(runs, baselines))
    scaling = meta_blog.gpu_scaling(sweep)
    beside = scaling[scaling["published_value"].notna()]
    assert set(beside["experiment"]) == {"optimized"}
    assert set(beside["world_size"]) == {64}
    assert beside["speedup"].tolist() == pytest.approx([3.0] * len(beside))


def test_a_baseline_of_another_device_gives_no_speedup_and_is_named():
    there = machine("V100", "one", base=100, o1=150)
    here = machine("A100", "one", fsdp=300)
    rows = cells(table(*there, *here), BASELINES).set_index("cell_id")
    assert math.isnan(rows.loc["fsdp", "speedup"])
    assert rows.loc["fsdp", "speedup_note"].startswith(opening("no_speedup"))
    assert "V100" in rows.loc["fsdp", "speedup_note"]
    assert rows.loc["fsdp", "images_per_second"] == pytest.approx(300)


def test_runs_of_one_block_on_two_devices_are_no_pair():
    moved = machine("A100", "one", o1=300)[2]
    runs = table(*machine("V100", "one", base=100), *machine("V100", "one", o1=150)[:2], moved)
    rows = cells(runs, BASELINES)
    old = rows[(rows["cell_id"] == "o1") & (rows["device"] == "V100")].iloc[0]
    assert (old["num_pairs"], old["speedup"]) == (2, pytest.approx(1.5))
    assert rows.loc[rows["device"] == "A100", "speedup"].isna().all()


def test_a_run_that_died_elsewhere_takes_no_row_of_its_own():
    died = run("o1", "b9", status=Status.killed, minute=9, sweep="one", precision="O1",
               environment={"device": "H200"})  # fmt: skip
    rows = cells(table(*machine("V100", "one", base=100, o1=150), died), BASELINES)
    assert len(rows) == 2
    assert set(rows["status"]) == {Status.measured}


def test_what_a_dearer_cell_saves_is_counted_with_the_ranks_of_its_baseline():
    # eight ranks, 2x the throughput of one: dearer by 8 / 2 = 4 times, so nothing is saved
    runs = table(
        *(run("base", f"b{i}", 1000, world_size=1) for i in range(3)),
        *(run("wide", f"b{i}", 2000, world_size=8) for i in range(3)),
    )
    money = cost(cells(runs, {"base": "base", "wide": "base"}), 1.0, 90).set_index("cell_id")
    assert money.loc["wide", "money"] == pytest.approx(4 * money.loc["base", "money"])
    assert money.loc["wide", "saved"] == pytest.approx(-3 * money.loc["base", "money"])
    assert money.loc["base", "saved"] == pytest.approx(0.0)


def test_after_a_slow_day_no_table_contradicts_the_speedup():
    # the variant ran only in the blocks of a slow day; the baseline ran on a fast one, too
    slow = [
        r
        for i, pace in enumerate([0.70, 0.72, 0.71])
        for r in (
            run("base", f"b{i}", 1000 * pace, minute=i),
            run("o1", f"b{i}", 1300 * pace * (1 + 0.01 * (i - 1)), minute=i, precision="O1"),
        )
    ]
    fast = [run("base", f"f{i}", 1000.0, minute=10 + i) for i in range(5)]
    rows = cells(table(*slow, *fast), BASELINES)
    hours = epoch_hours(rows).set_index("cell_id").loc["o1"]
    assert hours["epoch_hours_low"] < hours["epoch_hours"] < hours["epoch_hours_high"]
    ratio = pytest.approx(hours["speedup"], rel=1e-3)
    assert hours["baseline_epoch_hours"] / hours["epoch_hours"] == ratio
    row, base = (rows.set_index("cell_id").loc[c] for c in ("o1", "base"))
    assert row["images_per_second"] / base["images_per_second"] == ratio
    assert base["step_time_ms"] / row["step_time_ms"] == ratio
    assert row["unadjusted_images_per_second"] == pytest.approx(1300 * 0.72 * 1.0, rel=0.03)
    assert base["epoch_hours_imagenet1k"] / row["epoch_hours_imagenet1k"] == ratio


def test_a_measured_row_without_throughput_never_wins_a_scaling_curve():
    def point(cell, world, speed, **spec):
        return [run(cell, f"b{i}", speed, world_size=world, images_per_step=64, **spec)
                for i in range(3)]  # fmt: skip

    runs = table(
        *point("one", 1, 100.0),
        *point("two", 2, 180.0, **{"mesh.ring": 2}),
        *point("none", 2, math.nan, **{"mesh.ring": 1}),
    )
    curve = scaling_efficiency(runs, {})
    assert curve["cell_id"].tolist() == ["one", "two"]
    assert curve["efficiency"].tolist() == pytest.approx([1.0, 0.9])
    assert ranked_last(runs) == "none"


def ranked_last(runs):
    from vitsweep.tables.render import ranked

    return ranked(cells(runs, {}))["cell_id"].iloc[-1]


def test_two_folders_that_were_read_one_after_the_other_are_the_same_as_both_at_once():
    parts = [cells(two_machines().query("device == @d"), BASELINES) for d in SPEEDS]
    both = cells(two_machines(), BASELINES)
    joined = pd.concat(parts, ignore_index=True)
    pd.testing.assert_frame_equal(
        joined[["cell_id", "device", "speedup", "images_per_second"]],
        both[["cell_id", "device", "speedup", "images_per_second"]],
        check_dtype=False,
    )
    assert epoch_hours(joined)["epoch_hours"].tolist() == pytest.approx(
        epoch_hours(both)["epoch_hours"].tolist()
    )
