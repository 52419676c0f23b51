"""How often intervals hold the truth and claims are wrong, over simulated sweeps and gates (`full`).

`python -m tests.tables.test_simulated_sweeps` prints the tables of
benchmarks/results/simulations.md; with numbers of cells, the rates of sweeps of so many.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pandas import DataFrame, Series

from tests.builders import from_runs, run, table
from tests.noise import Noise as OfRuns
from tests.noise import Positions, coverage, rotated, simulate
from vitsweep import extras
from vitsweep.report import answer
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.stats import (
    BLOCKS_FOR_CORRELATION,
    LEVEL,
    MIN_BLOCKS,
    adjusted,
    any_look_half_width,
    any_look_p_value,
    half_width,
    moments,
    spread_factor,
    two_sided,
)

if "gate" in extras.FEATURES:
    gate = extras.load("gate.gate:gate")
    UNDECIDED, WORSE, verdicts, welch = (
        extras.load(f"gate.diff:{name}") for name in ("UNDECIDED", "WORSE", "verdicts", "welch")
    )

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]

SD, SWEEPS, MOST_ROUNDS, FIXED = 0.03, 4000, 40, 5
MISSING, CUT_SLOWDOWN = 0.1, 4.0
"""Share of runs that are lost, and how many times slower a cell is in its screening run to be pruned."""
CELLS = (4, 16, 64)
MANY, GATES, SELECTIONS = 14, 1000, 150
"""Blocks of long sweeps, simulated gates, and simulated sweeps whose winner's interval is judged."""
STATED = (Path(__file__).parents[2] / "benchmarks/results/simulations.md").read_text(
    encoding="utf-8"
)


def autocorrelated(correlation: float) -> Noise:
    """Neighbouring blocks correlate."""

    def noise(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        found = generator.normal(0, SD, shape)
        for block in range(1, shape[-1]):
            found[..., block] *= np.sqrt(1 - correlation**2)
            found[..., block] += correlation * found[..., block - 1]
        return found

    return noise


def two_modes(generator: np.random.Generator, shape: tuple[int, ...], stays: float = 0.2) -> Floats:
    """A fifth of the runs are 6 % slow; one after a slow one with probability `stays`."""
    slow = np.zeros(shape, bool)
    slow[..., 0] = generator.random(shape[:-1]) < 0.2
    for block in range(1, shape[-1]):
        chance = np.where(slow[..., block - 1], stays, (1 - stays) / 4)
        slow[..., block] = generator.random(shape[:-1]) < chance
    return generator.normal(0, SD / 2, shape) - 0.065 * slow


def three_days(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """The blocks lie on three days; each cell differs by 1 % from day to day."""
    day = np.arange(shape[-1]) * 3 // shape[-1]
    of_day = generator.normal(0, 0.01, (*shape[:-1], 3))
    return generator.normal(0, SD, shape) + of_day[..., day]


def another_day(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """All blocks lie on one day, on which each cell differs by 1 %."""
    of_day = generator.normal(0, 0.01, (*shape[:-1], 1))
    return generator.normal(0, SD, shape) + of_day


NOISE: dict[str, Noise] = {
    "gaussian": lambda g, shape: g.normal(0, SD, shape),
    "lognormal": lambda g, shape: SD * (g.lognormal(0, 0.5, shape) - 1.133) / 0.604,
    "Student's t, 3 degrees": lambda g, shape: SD * g.standard_t(3, shape) / np.sqrt(3),
    "two modes: a fifth of the runs 6 % slow": two_modes,
}
DEPENDENT: dict[str, Noise] = {
    "the same, and a slow mode lasts": lambda g, shape: two_modes(g, shape, stays=0.6),
    "three days, between which cells differ by 1 %": three_days,
    "neighbouring blocks correlate by 0.3": autocorrelated(0.3),
    "neighbouring blocks correlate by 0.6": autocorrelated(0.6),
}
GATED = NOISE | DEPENDENT | {"another day, on which cells differ by 1 %": another_day}


@dataclass(frozen=True)
class Rates:
    """Of one kind of sweep: shares from 0 to 1; `runs` are relative to five blocks of every cell."""

    coverage: float
    family_error: float
    runs: float


def sweeps(noise: Noise, num_cells: int, rounds: int, seed: int) -> tuple[Floats, Floats]:
    """Return log ratios (sweeps x cells x blocks, NaN where a run was lost) and those of the screening runs.

    The first quarter of the cells is 10 times slower than the baseline, the others are equal to it.
    """
    generator = np.random.default_rng(seed)
    truth = np.where(np.arange(num_cells) < num_cells // 4, -np.log(10), 0.0)
    shape = (SWEEPS, num_cells, rounds)
    logs = noise(generator, shape) - noise(generator, (SWEEPS, 1, rounds)) + truth[:, None]
    logs[generator.random(shape) < MISSING] = np.nan
    screened = noise(generator, (*shape[:2], 1)) - noise(generator, (SWEEPS, 1, 1))
    return logs, screened[..., 0] + truth


def summed(logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Return mean, standard deviation and number of the blocks of each cell."""
    number = np.count_nonzero(~np.isnan(logs), axis=-1).astype(float)
    with np.errstate(all="ignore"):
        mean = np.nansum(logs, -1) / number
        squares = np.nansum((logs - mean[..., None]) ** 2, -1)
        return mean, np.sqrt(squares / (number - 1)), number


def claimed(p_values: Floats, cut: NDArray[np.bool_], number: Floats) -> NDArray[np.bool_]:
    """Return which cells are called faster or slower, by Holm's procedure among those not cut."""
    tested = np.where(cut | (number < MIN_BLOCKS), np.nan, p_values)
    return np.array([adjusted(row)[0] < LEVEL for row in tested])


def factors(logs: Floats) -> Floats:
    """Return `spread_factor` of each cell; lost runs are left out."""
    return np.array([[spread_factor(cell[~np.isnan(cell)]) for cell in sweep] for sweep in logs])


@cache
def fixed_blocks(noise: Noise, num_cells: int, seed: int = 0, blocks: int = FIXED) -> Rates:
    """So many blocks of every cell that its screening run did not prune."""
    logs, screened = sweeps(noise, num_cells, blocks, seed)
    cut, (mean, spread, number) = -screened > np.log(CUT_SLOWDOWN), summed(logs)
    with np.errstate(all="ignore"):
        error = spread * factors(logs) / np.sqrt(number)
        half, p_values = half_width(error, number - 1), two_sided(mean, error, number - 1)
    kept = ~cut & (number >= MIN_BLOCKS)
    false = (
        claimed(p_values, cut, number).any(axis=1).mean()
    )  # what is kept is equal to the baseline
    runs = (blocks * (~cut).sum() + cut.size) / (blocks * cut.size)
    return Rates(float((np.abs(mean) <= half)[kept].mean()), float(false), float(runs))


@cache
def until_decided(noise: Noise, num_cells: int, seed: int = 1) -> Rates:
    """A block of each undecided cell, round after round: the interval at the end, and false claims ever."""
    logs, screened = sweeps(noise, num_cells, MOST_ROUNDS, seed)
    cut = -screened > np.log(CUT_SLOWDOWN)
    decided, ends = cut.copy(), np.full(cut.shape, MOST_ROUNDS)
    for rounds in range(MIN_BLOCKS, MOST_ROUNDS + 1):
        so_far = np.where(np.arange(rounds) < ends[..., None], logs[..., :rounds], np.nan)
        mean, spread, number = summed(so_far)
        if rounds >= BLOCKS_FOR_CORRELATION:
            spread = spread * factors(so_far)
        now = claimed(any_look_p_value(mean, spread, number), cut, number) & ~decided
        ends[now], decided = rounds, decided | now
    seen = np.where(np.arange(MOST_ROUNDS) < ends[..., None], logs, np.nan)
    mean, spread, number = summed(seen)
    kept = ~cut & (number >= MIN_BLOCKS)
    half = any_look_half_width(spread * factors(seen), number)
    false = (decided & ~cut).any(axis=1).mean()
    runs = (ends * ~cut).sum() / (FIXED * cut.size)
    return Rates(float((np.abs(mean) <= half)[kept].mean()), float(false), float(runs))


def in_blocks(noise: Noise, first: float = 0.0) -> OfRuns:
    """Return noise for `tests.noise.simulate`; `first` is added to the first run of each block."""

    def of_runs(generator: np.random.Generator, positions: Positions) -> Floats:
        sweeps, blocks, cells = positions.shape
        logs = np.moveaxis(noise(generator, (sweeps, cells, blocks)), -1, 1)
        return logs + first * (positions == 0)

    return of_runs


def is_one_fastest(logs: Floats) -> NDArray[np.bool_]:
    """Return of which sweeps (sweeps x cells x blocks, the baseline first) one cell is called fastest."""
    ratios = logs[:, 1:] - logs[:, :1]
    found = np.zeros(len(logs), bool)
    for sweep, cells in enumerate(ratios):
        low, high, p_values = of_logs(cells)
        shown = cells[(adjusted(p_values)[0] < LEVEL) & (low + high > 0)]
        leader = np.argsort(-of_logs(shown)[0]) if len(shown) else []
        for first in leader:
            behind = shown[first] - np.delete(shown, first, axis=0)
            low, high, p_values = of_logs(behind)
            apart = adjusted(p_values)[0] < LEVEL
            if not (apart & (low + high < 0)).any():
                found[sweep] = apart.all()
                break
    return found


def of_logs(logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Return both ends of the interval of each row of log ratios, and its p-value."""
    mean, spread, number = summed(logs)
    error = spread / np.sqrt(number)
    half = half_width(error, number - 1)
    return mean - half, mean + half, two_sided(mean, error, number - 1)


@cache
def called_fastest(noise: Noise, truth: tuple[float, ...] = (2.3,) * 8, blocks: int = 4) -> float:
    """Return how often one cell alone is called fastest, of cells with these speedups."""
    logs = noise(np.random.default_rng(2), (SWEEPS, 1 + len(truth), blocks))
    return float(is_one_fastest(logs + np.log((1.0, *truth))[:, None]).mean())


@cache
def winner_interval_holds(noise: Noise, cells: str, better: float) -> float:
    """Return how often the interval among all cells holds the truth of the cell with the highest estimate.

    First runs are slow. All cells are equal but the first, which is `better`.
    """
    generator, held = np.random.default_rng(2), []
    truth = dict.fromkeys(("base", *cells), 1.0) | {cells[0]: better}
    for _ in range(SELECTIONS):
        rows = speedup_over(
            *simulate(truth, in_blocks(noise, np.log(0.94)), generator, order=rotated)
        )
        row = rows.loc[rows["speedup"].where(rows["claim"] != "baseline").idxmax()]
        held.append(row["claim_low"] <= truth[row["cell_id"]] <= row["claim_high"])
    return float(np.mean(held))


@cache
def slow_runs_fail(share: float, blocks: int) -> tuple[float, float, float]:
    """Return bias, coverage and claims of cells of which a share of the runs is 20 % slower and fails.

    On the mean over all of its runs the cell is as fast as the baseline.
    """
    speeds = {"base": 1.0, "hangs": 0.8**-share}
    noise, sweeps = in_blocks(NOISE["gaussian"]), 1000
    generator = np.random.default_rng(5)
    runs, baselines = simulate(speeds, noise, generator, num_blocks=blocks, sweeps=sweeps)
    fails = runs["cell_id"].str.endswith("hangs") & (generator.random(len(runs)) < share)
    rows = speedup_over(runs.assign(status=runs["status"].mask(fails, "failed")), baselines)
    found = rows[rows["cell_id"].isin(runs.loc[fails, "cell_id"]) & rows["speedup_low"].notna()]
    bias = float(np.exp(np.log(found["speedup"]).mean()) - 1)
    return bias, coverage(found, 1.0), float((found["claim"] == "faster").mean())


def judged(kept: Floats, now: Floats, tolerance: float) -> DataFrame:
    """Return rows and verdicts of many gates over logs, gates x cells x blocks; cell 0 is the baseline."""
    sides = []
    for side in (kept, now):
        logs = np.concatenate([side[:, :1], side[:, 1:] - side[:, :1]], axis=1)
        row = np.repeat(np.arange(logs[..., 0].size), logs.shape[-1])
        sides.append(moments(Series(logs.ravel()).groupby(row)))
    found = welch(*sides)
    middle, error, degrees = (found[c] for c in ("middle", "error", "degrees"))
    beyond = (middle.abs() + np.log(1 - tolerance)).clip(lower=0)
    p_values = np.reshape(two_sided(beyond, error, degrees), (len(kept), -1))
    half = half_width(error, degrees, np.concatenate([adjusted(p)[1] for p in p_values]))
    found = found.assign(
        ratio=np.exp(middle), low=np.exp(middle - half), high=np.exp(middle + half)
    )
    facts = {"metric": "speedup", "better": "higher", "limit": 1 - tolerance, "of_baseline": False}
    facts |= {f"{fact}_{side}": value for side in ("kept", "now")
              for fact, value in (("status", "measured"), ("count", 5), ("lost_share", 0))}  # fmt: skip
    table = found.rename(columns={"low": "ratio_low", "high": "ratio_high"}).assign(**facts)
    table = table[np.arange(len(table)) % kept.shape[1] > 0].reset_index(drop=True)
    return table.assign(verdict=verdicts)


@cache
def gates(noise: Noise, loss: float, blocks: int, tolerance: float = 0.05) -> tuple[float, float]:
    """Return how many gates over 16 cells, of which one became slower by `loss`, failed or were undecided."""
    generator = np.random.default_rng(11)
    kept, now = (noise(generator, (GATES, 16, blocks)) for _ in range(2))
    now[:, 5] += np.log1p(-loss)
    found = judged(kept, now, tolerance)["verdict"].to_numpy().reshape(GATES, 15)
    failed = (found == WORSE).any(axis=1)
    undecided = ~failed & (found == UNDECIDED).any(axis=1)
    return float(failed.mean()), float(undecided.mean())


@pytest.mark.skipif("gate" not in extras.FEATURES, reason="its folder was removed")
def test_the_simulated_gates_are_gates() -> None:
    kept, now = autocorrelated(0.6)(np.random.default_rng(1), (2, 1, 6, 14))
    now[:, 3] -= 0.3
    sides = [
        table(*(
            run(f"c{c}", f"b{b}", 100 * np.exp(log), minute=b)
            for c, logs in enumerate(side[0]) for b, log in enumerate(logs)
        ))
        for side in (kept, now)
    ]  # fmt: skip
    rows = gate(sides[1], sides[0], 0.05, baselines={f"c{c}": "c0" for c in range(6)}).rows
    own = rows[~rows["of_baseline"]].sort_values("cell_id").reset_index(drop=True)
    simulated = judged(kept, now, 0.05)
    assert WORSE in set(own["verdict"])
    assert own["verdict"].tolist() == simulated["verdict"].tolist()
    assert own["ratio_low"].tolist() == pytest.approx(simulated["ratio_low"].tolist())


def test_the_simulated_answers_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST", 100)
    generator = np.random.default_rng(4)
    logs = generator.normal(0, SD, (30, 4, 4)) + np.log((1.0, 2.3, 2.3, 2.6))[:, None]
    runs = table(*(
        run(f"s{s}c{c}", f"b{b}", 100 * np.exp(log), minute=b, sweep=f"s{s}", precision=f"c{c}")
        for s, cells in enumerate(logs) for c, blocks in enumerate(cells) for b, log in enumerate(blocks)
    ))  # fmt: skip
    baselines = {f"s{s}c{c}": f"s{s}c0" for s in range(30) for c in range(4)}
    said = answer.answers(from_runs(runs, baselines))  # the shown ones first
    named = {
        next(s for s in range(30) if f"(sweep s{s})" in text): text
        for text in said
        if " is fastest:" in text or " is the fastest shown:" in text
    }
    assert [s in named for s in range(30)] == is_one_fastest(logs).tolist()
    assert len(said) == 30
    assert 3 < len(named) < 27


def sweep_row(name: str, num_cells: int = 4) -> str:
    """Return the rates of sweeps under a kind of noise as the page states them."""
    noise = (NOISE | DEPENDENT)[name]
    rates = [fixed_blocks(noise, num_cells), fixed_blocks(noise, num_cells, blocks=MANY)]
    found = [
        percents(r.coverage, r.family_error) for r in (*rates, until_decided(noise, num_cells))
    ]
    ways = ((2.3,) * 8, (2.3,) * 2, (2.6, *[2.3] * 7))
    named = percents(*(called_fastest(noise, truth) for truth in ways))
    return f"| {name} | {' | '.join(found)} | {named} |"


def gate_row(name: str) -> str:
    """Return the rates of gates under a kind of noise as the page states them."""
    noise, found = GATED[name], []
    for blocks, losses in ((FIXED, (0.1, 0.25)), (MANY, (0.1,))):
        found.append(percents(gates(noise, 0.0, blocks, tolerance=0.0)[0]))
        found += [percents(*gates(noise, loss, blocks)) for loss in losses]
    return f"| {name} | {' | '.join(found)} |"


def percents(*shares: float) -> str:
    return ", ".join(f"{100 * share:.1f} %" for share in shares)


@pytest.mark.full
@pytest.mark.parametrize("num_cells", CELLS)
@pytest.mark.parametrize("noise", NOISE)
def test_five_blocks_with_cut_cells(noise: str, num_cells: int) -> None:
    found = fixed_blocks(NOISE[noise], num_cells)
    assert 0.93 <= found.coverage <= 0.97
    assert found.family_error <= 0.055
    assert found.runs < 1


@pytest.mark.full
@pytest.mark.parametrize("num_cells", CELLS)
@pytest.mark.parametrize("noise", NOISE)
def test_blocks_until_a_cell_is_decided(noise: str, num_cells: int) -> None:
    found = until_decided(NOISE[noise], num_cells)
    assert found.coverage >= 0.94
    assert found.family_error <= 0.055


@pytest.mark.full
@pytest.mark.parametrize("noise", [k for k in DEPENDENT if "0.6" not in k])
def test_twelve_blocks_that_depend_on_one_another_still_hold_the_truth(noise: str) -> None:
    found = fixed_blocks(DEPENDENT[noise], 4, blocks=MANY)  # a tenth of the runs is lost
    assert found.coverage >= 0.92
    assert found.family_error <= 0.10


@pytest.mark.full
@pytest.mark.parametrize("noise", NOISE)
def test_gates_fail_without_a_loss_as_rarely_as_they_say_and_find_large_losses(noise: str) -> None:
    for blocks in (FIXED, MANY):
        assert (
            gates(NOISE[noise], 0.0, blocks, tolerance=0.0)[0] <= 0.05 + 2 * (0.05 / GATES) ** 0.5
        )
    assert gates(NOISE[noise], 0.25, FIXED)[0] > 0.9


@pytest.mark.full
@pytest.mark.parametrize("noise", NOISE)
def test_one_of_equal_cells_is_rarely_called_fastest_and_a_better_one_often(noise: str) -> None:
    assert called_fastest(NOISE[noise]) <= 0.01
    assert called_fastest(NOISE[noise], (2.3,) * 2) <= 0.055
    assert called_fastest(NOISE[noise], (2.6, *[2.3] * 7)) > 0.5


@pytest.mark.full
@pytest.mark.parametrize("cells", ["abcde", "abcdefghijklmnop"])
@pytest.mark.parametrize("better", [1.0, 1.05])
@pytest.mark.parametrize("noise", NOISE)
def test_the_interval_among_all_cells_holds_the_speedup_of_the_best(
    noise: str, better: float, cells: str
) -> None:
    assert winner_interval_holds(NOISE[noise], cells, better) >= 0.94


@pytest.mark.full
def test_no_cell_whose_slow_runs_fail_is_called_faster() -> None:
    for share in (0.1, 0.4):
        (bias, five, false), (_, many, still) = (slow_runs_fail(share, b) for b in (FIXED, MANY))
        assert (
            f"{100 * bias:.0f} % too fast, in {100 * five:.0f} % and {100 * many:.0f} %" in STATED
        )
        assert false == still == 0


@pytest.mark.full
@pytest.mark.parametrize("noise", GATED)
def test_the_page_states_these_rates(noise: str) -> None:
    assert gate_row(noise) in STATED
    assert noise not in NOISE | DEPENDENT or sweep_row(noise) in STATED


def main() -> None:
    """Print the rates of every kind of noise as they are computed."""
    for num_cells in map(int, sys.argv[1:] or [4]):
        for name in NOISE | DEPENDENT:
            print(sweep_row(name, num_cells), flush=True)
    for name in GATED if not sys.argv[1:] else ():
        print(gate_row(name), flush=True)


if __name__ == "__main__":
    main()
