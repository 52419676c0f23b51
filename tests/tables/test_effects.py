"""Main effects and interactions: by hand on two by two, against simulated truths, on broken tables."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from pandas import DataFrame, concat
from scipy import stats

from tests.builders import run, table
from tests.noise import autocorrelated, normal, simulate
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.blocks import within_blocks
from vitsweep.tables.effects import effects

LEVELS = {
    "precision": ["fp32", "O1"],
    "compilation": ["eager", "compile"],
    "attention": ["sdpa_auto", "sdpa_math", "sdpa_flash"],
}
TWO = {k: LEVELS[k][:2] for k in ("compilation", "attention")}
PAGE = Path(__file__).parents[2] / "benchmarks/results/simulations.md"
AVERAGE = {"compile": 0.27, "O1": 0.2, "sdpa_flash": 0.05}
TOGETHER = {("compile", "sdpa_math"): -0.25}


def grid(levels, alone, together, rest=lambda: 0.0):
    """Cell -> log throughput, and cell -> spec, over every combination."""
    logs, specs = {}, {}
    for choices in itertools.product(*levels.values()):
        pairs = itertools.combinations(choices, 2)
        total = sum(alone.get(c, 0.0) for c in choices) + sum(together.get(p, 0.0) for p in pairs)
        logs["-".join(choices)] = total + rest()
        specs["-".join(choices)] = dict(zip(levels, choices, strict=True))
    return logs, specs


def simulated(logs, specs, noise, seed=0, leave_out=(), **kwargs):
    first = next(iter(logs))
    truth = {c: float(np.exp(v - logs[first])) for c, v in logs.items() if c not in leave_out}
    return simulate(truth, noise, np.random.default_rng(seed), specs=specs, **kwargs)


def mean_difference(logs, row):
    """The true effect of a row of the table, from the true logs of the cells that were measured."""
    sides = [row["technique"].split("=")[1], row["against"].split("=")[1]]
    given = row["given"].split("=")[-1]
    of_side = [
        {frozenset(cell.split("-")) - {s}: v for cell, v in logs.items() if s in cell.split("-")}
        for s in sides
    ]
    both = [c for c in of_side[0] if c in of_side[1] and (not given or given in c)]
    return float(np.mean([of_side[0][c] - of_side[1][c] for c in both]))


def one(found, technique, given=""):
    return found[(found["technique"] == technique) & (found["given"] == given)].iloc[0]


def test_two_by_two_by_hand():
    logs, specs = grid(TWO, AVERAGE, TOGETHER)
    runs, baselines = simulated(logs, specs, normal(0.03), num_blocks=4)
    found = effects(runs, baselines)
    wide = np.log(runs.pivot_table(index="block", columns="cell_id", values="images_per_second"))
    with_auto = wide["compile-sdpa_auto"] - wide["eager-sdpa_auto"]
    with_math = wide["compile-sdpa_math"] - wide["eager-sdpa_math"]
    average = one(found, "compilation=compile")
    assert np.log(average["effect"]) == pytest.approx((with_auto + with_math).mean() / 2)
    given = one(found, "compilation=compile", "attention=sdpa_math")
    assert np.log(given["effect"]) == pytest.approx(with_math.mean(), abs=1e-4)
    ratio = with_math.mean() - (with_auto + with_math).mean() / 2
    assert np.log(given["ratio_to_average"]) == pytest.approx(ratio, abs=1e-4)
    # Student's t over the contrasts of the blocks
    sd = ((with_auto + with_math) / 2).std()
    half = stats.t.ppf(0.975, 3) * sd / np.sqrt(4)
    assert np.log(average["effect_high"] / average["effect"]) == pytest.approx(half, rel=1e-3)
    assert (average["num_cells"], average["num_blocks"]) == (4, 4)


def test_an_average_a_company_and_what_is_reported_of_them():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    found = effects(*simulated(logs, specs, normal(0.01)))
    average = one(found, "compilation=compile")
    assert average["effect"] == pytest.approx(np.exp(0.27 - 0.25 / 3), rel=0.02)
    assert average["claim"] == "faster"
    assert average["against"] == "compilation=eager"
    given = one(found, "compilation=compile", "attention=sdpa_math")
    assert given["effect"] == pytest.approx(np.exp(0.02), rel=0.02)
    assert given["interaction"] == "less than on average"


def test_without_noise_every_effect_comes_back():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    found = effects(*simulated(logs, specs, normal(0.0)))
    truth = [mean_difference(logs, row) for row in found.to_dict("records")]
    assert np.log(found["effect"].to_numpy(float)) == pytest.approx(truth, abs=1e-3)


@pytest.mark.parametrize(
    ("sweeps", "noisier"),
    [
        (24, 1),
        pytest.param(70, 1, marks=pytest.mark.full),
        pytest.param(70, 20, marks=pytest.mark.full),
    ],
)
def test_effects_are_unbiased_and_their_intervals_cover_the_truth(sweeps, noisier):
    generator = np.random.default_rng(5)
    errors, hits, of_ratio = [], [], []
    for seed in range(sweeps):
        alone = {c: generator.normal(0, 0.1) for v in LEVELS.values() for c in v[1:]}
        factors = itertools.combinations(LEVELS.values(), 2)
        pairs = [pair for two in factors for pair in itertools.product(*two)]
        together = {pair: generator.normal(0, 0.04) for pair in pairs}
        logs, specs = grid(LEVELS, alone, together, lambda: generator.normal(0, 0.005))
        gone = [c for c in list(logs)[1:] if generator.random() < 0.15 * (seed % 2)]
        kept = [c for c in logs if c not in gone]
        spread = np.where(["compile" in c for c in kept], 0.03, 0.03 / noisier)
        noise = lambda g, where, spread=spread: g.normal(0.0, spread, where.shape)  # noqa: E731
        runs, baselines = simulated(logs, specs, noise, seed, gone)
        found = effects(runs, baselines)
        known, logs = found[found["effect"].notna()], {c: logs[c] for c in kept}
        for row in known.to_dict("records"):
            truth = mean_difference(logs, row)
            errors.append(np.log(row["effect"]) - truth)
            hits.append(np.log(row["effect_low"]) <= truth <= np.log(row["effect_high"]))
            if row["kind"] == "given":
                ratio = truth - mean_difference(logs, row | {"given": ""})
                of_ratio.append(np.log(row["ratio_low"]) <= ratio <= np.log(row["ratio_high"]))
    assert len(hits) > 11 * sweeps
    within = 0.03 * np.sqrt(70 / sweeps)
    assert np.mean(errors) == pytest.approx(0.0, abs=0.002)
    assert np.mean(hits) == pytest.approx(0.95, abs=within)
    assert np.mean(of_ratio) == pytest.approx(0.95, abs=within)


DEPENDENT = {
    "gaussian": normal(),
    "neighbouring blocks correlate by 0.3": autocorrelated(correlation=0.3),
    "neighbouring blocks correlate by 0.6": autocorrelated(correlation=0.6),
}


def rates(noise, num_blocks, sweeps=210):
    """Coverage, and sweeps with a false claim, of averages and of effects with another choice."""
    logs, specs = grid(
        {"precision": ["fp32", "O1", "O2"], "compilation": ["eager", "compile"]}, {}, {}
    )
    runs = [simulated(logs, specs, noise, seed, num_blocks=num_blocks) for seed in range(sweeps)]
    found = concat([effects(*sweep).assign(sweep=i) for i, sweep in enumerate(runs)])
    holds = (found["effect_low"] <= 1) & (found["effect_high"] >= 1)
    false = found["claim"].isin(["faster", "slower"]).groupby([found["kind"], found["sweep"]]).any()
    shares = [holds.groupby(found["kind"]).mean(), false.groupby(level=0).mean()]
    return "; ".join(", ".join(f"{100 * s[k]:.0f} %" for k in ("average", "given")) for s in shares)


@pytest.mark.full
@pytest.mark.parametrize("noise", DEPENDENT)
def test_the_page_states_what_blocks_that_depend_on_one_another_do_to_effects(noise):
    found = [rates(DEPENDENT[noise], num_blocks) for num_blocks in (5, 14)]
    assert f"| {noise} | {' | '.join(found)} |" in PAGE.read_text(encoding="utf-8")


def four(levels, pace=lambda block: 1.0, cells=()):
    """Runs of a plain cell, two techniques and both, in three blocks of their own pace."""
    specs = {"base": {}, "o1": {"precision": "O1"}, "fsdp": {"sharding": "fsdp"}}
    specs["both"] = specs["o1"] | specs["fsdp"]
    kept = cells or tuple(specs)
    runs = table(
        *(run(c, f"b{i}", levels[c] * pace(i), **specs[c]) for c in kept for i in range(3)),
        *(run(c, "b0", status=Status.out_of_memory, reason="no room", **specs[c])
          for c in specs if c not in kept),
    )  # fmt: skip
    return effects(runs, dict.fromkeys(specs, "base"))


def test_what_both_bring_beyond_the_product_of_their_speedups():
    speeds = {"base": 100, "o1": 150, "fsdp": 90, "both": 160}
    found = four(speeds, lambda block: [1.0, 0.7, 1.2][block])
    average = one(found, "precision=O1")
    given = one(found, "precision=O1", "sharding=fsdp")
    assert average["effect"] == pytest.approx((1.5 * 160 / 90) ** 0.5, rel=1e-3)
    assert given["effect"] == pytest.approx(160 / 90, rel=1e-3)
    assert given["ratio_to_average"] == pytest.approx((160 / 90 / 1.5) ** 0.5, rel=1e-3)
    assert given["interaction"] == "more than on average"


def test_an_effect_of_cells_whose_slow_runs_failed_is_not_called_faster():
    logs, specs = grid(TWO, {"compile": 0.2, "sdpa_math": -0.2}, {})
    runs, baselines = simulated(logs, specs, normal(0.01))
    failed = (runs["block"] == "b1") & (runs["cell_id"] == "compile-sdpa_math")
    found = effects(runs.assign(status=runs["status"].mask(failed, "failed")), baselines)
    lost = one(found, "compilation=compile")
    assert (lost["claim"], lost["note"]) == ("missing blocks", "")
    assert one(found, "attention=sdpa_math")["claim"] == "slower"


def test_an_interaction_within_the_noise_is_not_claimed():
    generator = np.random.default_rng(3)
    found = four({"base": 100, "o1": 150, "fsdp": 90, "both": 135},
                 lambda block: float(np.exp(generator.normal(0, 0.04))))  # fmt: skip
    assert set(found["interaction"]) == {"no interaction shown"} | (
        {""} & set(found["interaction"])
    )


def test_a_choice_that_failed_has_no_effect_together_with_another():
    found = four({"base": 100, "o1": 150, "both": 160}, cells=("base", "o1", "both"))
    together = one(found, "precision=O1", "sharding=fsdp")
    assert np.isnan(together["effect"])
    assert together["claim"] == ""


def test_choices_that_never_met_are_named_and_the_average_leaves_them_out():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    gone = [c for c in logs if "compile" in c and "sdpa_math" in c]
    found = effects(*simulated(logs, specs, normal(0.01), leave_out=gone))
    average = one(found, "compilation=compile")
    assert average["note"] == "without attention=sdpa_math"
    assert average["effect"] == pytest.approx(np.exp(0.27), rel=0.02)
    given = one(found, "compilation=compile", "attention=sdpa_math")
    assert np.isnan(given["effect"])
    assert "not measured with attention=sdpa_math" in given["note"]
    assert given["claim"] == ""


def test_choices_that_only_come_together_are_not_distinguished():
    specs = {"base": {}, "both": {"precision": "O1", "sharding": "fsdp"}}
    runs, baselines = simulate(
        {"base": 1.0, "both": 1.5}, normal(0.01), np.random.default_rng(0), specs=specs
    )
    found = effects(runs, baselines)
    assert found["effect"].isna().all()
    why = "not measured with the same sharding as precision=fp32"
    assert one(found, "precision=O1")["note"] == why


def test_one_at_a_time_is_the_speedup_alone_and_says_so():
    specs = {"base": {}, "O1": {"precision": "O1"}, "fsdp": {"sharding": "fsdp"}}
    truth = {"base": 1.0, "O1": 1.3, "fsdp": 0.9}
    runs, baselines = simulate(truth, normal(0.001), np.random.default_rng(0), specs=specs)
    found = effects(runs, baselines)
    average = one(found, "precision=O1")
    assert average["effect"] == pytest.approx(1.3, rel=0.01)
    assert average["note"] == "without sharding=fsdp"


def test_baselines_of_several_sizes_are_a_factor_of_their_own():
    cells = {}
    for ranks, scale in ((1, 0.0), (4, 1.2)):
        gain = 0.3 if ranks == 1 else 0.1
        cells[f"plain{ranks}"] = (scale, {"world_size": ranks})
        cells[f"fast{ranks}"] = (scale + gain, {"world_size": ranks, "compilation": "compile"})
    truth = {c: float(np.exp(v)) for c, (v, _) in cells.items()}
    specs = {c: s for c, (_, s) in cells.items()}
    runs, _ = simulate(truth, normal(0.01), np.random.default_rng(0), specs=specs)
    found = effects(runs, {c: f"plain{c[-1]}" for c in truth})
    assert one(found, "compilation=compile")["effect"] == pytest.approx(np.exp(0.2), rel=0.02)
    assert set(found["technique"]) == {"compilation=compile"}
    assert found["given"].tolist()[1:] == ["baseline=1 rank", "baseline=4 ranks"]
    assert found["effect"].tolist()[1:] == pytest.approx([np.exp(0.3), np.exp(0.1)], rel=0.02)


def test_two_devices_are_two_tables():
    logs, specs = grid(TWO, AVERAGE, TOGETHER)
    here, baselines = simulated(logs, specs, normal(0.01))
    slow = {c: v * 0.5 for c, v in logs.items()}
    there, _ = simulated(slow, specs, normal(0.01), environment={"device": "H200"})
    found = effects(DataFrame({c: [*here[c], *there[c]] for c in here}), baselines)
    assert found["device"].unique().tolist() == ["AMD EPYC 7B13", "H200"]
    average = found[(found["technique"] == "compilation=compile") & (found["given"] == "")]
    assert average["effect"].tolist() == pytest.approx([np.exp(0.145), np.exp(0.0725)], rel=0.02)


def test_below_three_blocks_there_is_an_effect_without_an_interval():
    logs, specs = grid(TWO, AVERAGE, TOGETHER)
    found = effects(*simulated(logs, specs, normal(0.01), num_blocks=2))
    average = one(found, "compilation=compile")
    assert average["effect"] > 1.1
    assert np.isnan(average["effect_low"])
    assert average["claim"] == "too few blocks"


def test_runs_without_a_speed_are_left_out():
    logs, specs = grid(TWO, AVERAGE, TOGETHER)
    runs, baselines = simulated(logs, specs, normal(0.0), num_blocks=8)
    bad = runs["images_per_second"].to_numpy(copy=True)
    bad[[3, 9, 14, 21]] = [np.nan, np.inf, 0.0, -5.0]
    found = effects(runs.assign(images_per_second=bad), baselines)
    assert one(found, "compilation=compile")["effect"] == pytest.approx(np.exp(0.145), rel=0.001)


def test_cells_that_shared_no_block_have_no_effects():
    apart = table(
        *(run("a", f"a{i}", 100) for i in range(3)),
        *(run("b", f"b{i}", 200, precision="O1") for i in range(3)),
    )
    assert effects(apart, {"a": "a", "b": "a"}).empty


@pytest.mark.parametrize(
    "runs",
    [
        DataFrame(),
        table(run("a")).iloc[:0],
        table(run("a")),
        table(run("a", status=Status.failed, reason="..."), run("b", status=Status.failed, reason="...")),
        table(run("a", images_per_second=None), run("b", images_per_second=float("nan"))),
        table(run("a"), run("a")),
        table(run("a"), run("b", precision="O1")).drop(columns="images_per_second"),
    ],
)  # fmt: skip
def test_tables_without_a_comparison_have_no_effects(runs):
    found = effects(runs, {"a": "a", "b": "a"})
    assert found.empty
    assert "effect_low" in found


@pytest.mark.parametrize("column", ["cell_id", "block", "status"])
def test_a_missing_column_is_named(column):
    with pytest.raises(VitsweepError, match=f"Column `{column}`"):
        effects(table(run("a"), run("b", precision="O1")).drop(columns=column), {})


def test_text_instead_of_a_throughput_is_named():
    runs = table(run("a"), run("b", precision="O1")).astype({"images_per_second": object})
    runs.loc[0, "images_per_second"] = "fast"
    with pytest.raises(VitsweepError, match=r"`images_per_second`.*`fast`"):
        effects(runs, {})


def test_within_blocks_agrees_with_least_squares_on_dummies():
    runs, _ = simulate({"a": 1.0, "b": 1.2, "c": 0.9}, normal(0.05), np.random.default_rng(3))
    runs = runs.drop(index=[2, 7, 8])
    data = within_blocks(runs)
    log = np.log(runs["images_per_second"].to_numpy())
    cell = np.array([data.cells.index(c) for c in runs["cell_id"]])
    block = runs["block"].astype("category").cat.codes.to_numpy()
    design = np.column_stack([np.eye(3)[cell], np.eye(5)[block]])
    solution, _, rank, _ = np.linalg.lstsq(design, log, rcond=None)
    assert np.diff(data.logs) == pytest.approx(np.diff(solution[:3]))
    residual = log - design @ solution
    assert data.residual == pytest.approx(residual @ residual)
    assert data.degrees == len(runs) - rank


def test_the_variance_over_blocks_is_unbiased_where_blocks_hold_different_cells():
    generator, found = np.random.default_rng(4), []
    for _ in range(100):
        truth = {"a": 1.0, "b": 1.2, "c": 0.9, "d": 1.1}
        runs, _ = simulate(truth, normal(0.05), generator, num_blocks=7)
        data = within_blocks(runs.drop(index=[1, 5, 6, 8, 13, 14, 19, 23]))
        weights = (
            np.linalg.pinv(data.information)[[0, 2]] - np.linalg.pinv(data.information)[[1, 3]]
        )
        exact = 0.05**2 * np.einsum("ic,cd,id->i", weights, data.information, weights)
        variance, degrees = data.variance_over_blocks(weights)
        assert 1 <= degrees.min() <= degrees.max() < 6.001
        found.append(variance / exact)
    assert np.mean(found, axis=0) == pytest.approx(1.0, abs=0.2)


def test_what_a_block_ran_on_other_nodes_is_another_block():
    def on(nodes):
        return {"environment": {"nodes_used": nodes}}

    kept = [
        run(c, f"b{i}", s, **on("n1,n2")) for i in range(3) for c, s in (("a", 100), ("b", 200))
    ]
    moved = [run("a", "b3", 100, **on("n1,n2")), run("b", "b3", 900, **on("n3,n4"))]
    data = within_blocks(table(*kept, *moved))
    assert np.exp(np.diff(data.logs))[0] == pytest.approx(2.0)
    part = [run("a", "b3", 100, **on("n1,n2")), run("b", "b3", 200, **on("n1"))]
    assert within_blocks(table(*kept, *part)).num_blocks.tolist() == [4, 4]
    assert within_blocks(table(*kept, *part)).degrees == 3


def test_an_effect_of_cells_that_were_timed_separately_says_so():
    runs, baselines = simulated(*grid(TWO, {}, {}), normal(0.01))
    windows = runs["cell_id"].map({"compile-sdpa_auto": 4.9}).fillna(1.7)
    found = effects(runs.assign(window_seconds=windows), baselines)
    assert one(found, "compilation=compile")["timed"] == "timed for 4.9 s, without it for 1.7 s"
    given = ("attention=sdpa_auto", "attention=sdpa_math")
    assert [bool(one(found, "compilation=compile", g)["timed"]) for g in given] == [True, False]
    assert one(found, "attention=sdpa_math")["timed"].startswith("timed for 1.7 s")


def test_what_longer_timing_may_explain_is_not_claimed():
    for size, claims in ((0.01, ("no difference shown", "no interaction shown")),
                         (0.05, ("faster", "more than on average"))):  # fmt: skip
        logs, specs = grid(TWO, {"compile": size / 2}, {("compile", "sdpa_auto"): size})
        runs, baselines = simulated(logs, specs, normal(1e-4))
        longer = runs["cell_id"].map({"compile-sdpa_auto": 4.9}).fillna(1.7)
        for windows, told in ((longer, claims), (1.7, ("faster", "more than on average"))):
            found = effects(runs.assign(window_seconds=windows), baselines)
            row = one(found, "compilation=compile", "attention=sdpa_auto")
            assert (row["claim"], row["interaction"]) == told
