"""Blocks give every cell its pairs, in an order that favours no position."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp

from tests.builders import run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    blocks,
    describe_least_blocks,
    runs_per_cell,
    screenings,
    warm_up_cell,
)
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.rounds import EXTRA_ROUNDS, blocks_in_turn, grid
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.record import SCREENING, RunRecord, Status

CODE: dict[str, Any] = {"git_commit": "0123abcd", "packages": {"torch": "2.13.0"}}
TORCH = CODE["packages"]["torch"]
SEEDS = range(20)


def sweep(*overrides: str) -> SweepPlan:
    return plan_of(expand([*TINY, *overrides], composer()), LAPTOP, composer())


FOUR = ("sharding=ddp,fsdp", "optimizer=adamw_loop,adamw_foreach")


# --- Order --------------------------------------------------------------------------------------


def drawn(num_cells: int, num_blocks: int, seed: int, past: int = 0) -> list[list[str]]:
    order, cells = BalancedOrder(seed=seed), [f"c{number}" for number in range(num_cells)]
    return [order.next_block(cells) for _ in range(past + num_blocks)][past:]


def test_as_many_blocks_as_cells_are_a_latin_square() -> None:
    for num_cells in [2, 3, 4, 5, 9]:
        for seed in SEEDS:
            square = np.array(drawn(num_cells, num_cells, seed))
            for lines in (square, square.T):
                assert all(len(set(line)) == num_cells for line in lines)


def test_no_cell_is_at_a_position_twice_more_often_than_another() -> None:
    for num_cells in [2, 3, 4, 9]:
        for num_blocks in [1, 3, 5, 11]:
            for seed in SEEDS:
                orders = drawn(num_cells, num_blocks, seed)
                counts = Counter(
                    (cell, place) for order in orders for place, cell in enumerate(order)
                )
                every = [
                    counts[f"c{cell}", place]
                    for cell in range(num_cells)
                    for place in range(num_cells)
                ]
                assert max(every) - min(every) <= 1


@pytest.mark.parametrize("num_cells", [2, 4, 8])
def test_the_second_block_is_the_first_reversed(num_cells: int) -> None:
    for seed in SEEDS:
        first, second = drawn(num_cells, 2, seed)
        assert second == first[::-1]


@pytest.mark.parametrize(("num_cells", "num_blocks"), [(2, 4), (4, 4), (3, 6), (9, 18), (9, 5)])
def test_a_linear_drift_within_blocks_cancels(num_cells: int, num_blocks: int) -> None:
    for seed in SEEDS:
        places: dict[str, list[int]] = {}
        for order in drawn(num_cells, num_blocks, seed):
            for place, cell in enumerate(order):
                places.setdefault(cell, []).append(place)
        means = [float(np.mean(found)) for found in places.values()]
        is_whole = num_blocks % num_cells == 0
        assert max(means) - min(means) <= (0 if is_whole else 0.25 * num_cells)


def test_which_cell_begins_is_random() -> None:
    first = Counter(drawn(3, 1, seed)[0][0] for seed in range(300))
    assert all(70 < count < 130 for count in first.values())
    assert len({tuple(drawn(3, 1, seed)[0]) for seed in range(300)}) == 6


def test_a_cell_follows_each_other_cell_alike_often() -> None:
    """First-order carry-over, which a Williams design balances: here near that, over 40 sweeps."""
    follows = Counter(
        pair for seed in range(40) for order in drawn(4, 4, seed) for pair in pairwise(order)
    )
    assert len(follows) == 12
    assert max(follows.values()) < 1.6 * min(follows.values())


def test_a_resumed_sweep_balances_over_what_ran_before() -> None:
    for seed in SEEDS:
        order = BalancedOrder(seed=seed)
        before = [order.next_block(["a", "b", "c"]) for _ in range(2)]
        records = [
            replace(run(cell, f"b{number}", 100), position=place)
            for number, cells in enumerate(before)
            for place, cell in enumerate(cells)
        ]
        third = BalancedOrder.after(records[::-1]).next_block(["a", "b", "c"])
        assert all(len(set(column)) == 3 for column in zip(*before, third, strict=True))


def test_blocks_of_other_cells_do_not_count_for_a_shared_baseline() -> None:
    """A large sweep has several blocks per round, each with a run of the same baseline."""
    for seed in SEEDS:
        order = BalancedOrder(seed=seed)
        found: dict[str, list[int]] = {"x": [], "y": []}
        for _ in range(4):
            for chunk in ("x", "y"):
                cells = [f"{chunk}{number}" for number in range(3)]
                found[chunk].append(order.next_block([*cells, "base"]).index("base"))
        assert sorted(found["x"]) == sorted(found["y"]) == [0, 1, 2, 3]


def false_claims(
    draw: Callable[[np.random.Generator, int], list[list[str]]], num_blocks: int
) -> float:
    """Share of 4,000 sweeps that call one of two equal cells faster; first runs are 20 % slow."""
    random, claims, num_sweeps = np.random.default_rng(7), 0, 4_000
    for _ in range(num_sweeps):
        ratios = []
        for order in draw(random, num_blocks):
            logs = {c: random.normal(0, 0.01) for c in order}
            logs[order[0]] -= np.log(1.2)
            ratios.append(logs["a"] - logs["b"])
        claims += ttest_1samp(ratios, 0).pvalue < 0.05
    return claims / num_sweeps


def shuffled(random: np.random.Generator, num_blocks: int) -> list[list[str]]:
    return [list(random.permutation(["a", "b"])) for _ in range(num_blocks)]


def balanced(random: np.random.Generator, num_blocks: int) -> list[list[str]]:
    order = BalancedOrder(seed=int(random.integers(1 << 32)))
    return [order.next_block(["a", "b"]) for _ in range(num_blocks)]


@pytest.mark.full
def test_slow_first_runs_make_no_false_claims() -> None:
    assert false_claims(shuffled, 3) > 0.15, "with a random order they do"
    assert false_claims(balanced, 3) <= 0.07
    assert false_claims(balanced, 5) <= 0.07


# --- Blocks -------------------------------------------------------------------------------------


def test_every_block_holds_the_baseline_of_its_cells() -> None:
    plan = sweep("sharding=fsdp,zero1,zero2", "optimizer=adamw_loop,adamw_foreach")
    missing = {e.cell_id: 2 for e in plan.entries.values() if not e.is_added_baseline}
    [baseline] = [e for e in plan.entries.values() if e.is_added_baseline]
    found = list(blocks(plan, missing, 4))
    assert [len(block.entries) for block in found] == [5, 3, 5, 3]
    assert all(baseline in block.entries for block in found)
    counts = Counter(e.cell_id for block in found for e in block.entries)
    assert counts == runs_per_cell(plan, missing, 4)
    assert counts == {**missing, baseline.cell_id: 4}


class Machine:
    """Runs blocks in no time; `ends` says how a run ends that was not measured."""

    def __init__(self, plan: SweepPlan, ends: Callable[[str, int], Status | None]) -> None:
        self.plan, self.ends = plan, ends
        self.records: list[RunRecord] = []
        self.blocks: list[Block] = []
        self.settings = replace(sweep_settings(composer().compose().tree), prune_slowdown=None)
        self._tries: Counter[str] = Counter()

    def state(self) -> ResumeState:
        return resume_state(self.plan, (), self.settings, TORCH, self.records)

    def run(self) -> ResumeState:
        for block in self._rounds():
            self.blocks.append(block)
            for place, entry in enumerate(block.entries, start=block.first_position):
                self._tries[entry.cell_id] += 1
                status = self.ends(entry.cell_id, self._tries[entry.cell_id]) or Status.measured
                record = run(entry.cell_id, block.name, 100, status=status)
                self.records.append(replace(record, position=place))
        return self.state()

    def _rounds(self) -> Iterator[Block]:
        return blocks_in_turn(grid(self.plan, self.settings, (), CODE), self.records)


def test_without_faults_there_is_one_block_per_round() -> None:
    plan = sweep(*FOUR)
    machine = Machine(plan, lambda cell, number: None)
    assert machine.run().missing_blocks == {}
    assert len(machine.blocks) == 5
    assert len(machine.records) == 20


def test_before_each_block_a_command_says_how_many_runs_are_to_come() -> None:
    plan, records, told = sweep(*FOUR), list[RunRecord](), list[int]()
    settings = replace(sweep_settings(composer().compose().tree), prune_slowdown=None)
    rounds = grid(plan, settings, (), CODE)
    for block in blocks_in_turn(rounds, records, (), lambda runs: told.append(Counter.total(runs))):
        records += [run(entry.cell_id, block.name, 100) for entry in block.entries]
    assert told == [20, 16, 12, 8, 4]


@pytest.mark.parametrize("number", range(4))
def test_a_run_that_was_killed_once_is_repeated_at_the_end_of_its_block(number: int) -> None:
    plan = sweep(*FOUR)
    victim = list(plan.entries)[number]
    machine = Machine(plan, lambda c, n: Status.killed if (c, n) == (victim, 2) else None)
    assert machine.run().missing_blocks == {}
    assert len(machine.records) == 21
    [repeat] = [block for block in machine.blocks if block.first_position]
    assert [entry.cell_id for entry in repeat.entries] == [victim]
    assert repeat.first_position == 4
    before = machine.blocks[machine.blocks.index(repeat) - 1]
    assert before.name == repeat.name


def test_a_baseline_that_is_lost_for_good_in_one_block_costs_no_cell_a_pair() -> None:
    plan = sweep(*FOUR)
    [baseline] = {e.baseline_id for e in plan.entries.values()}
    killed = {2, 3}  # in the second block, and when it is repeated there
    machine = Machine(plan, lambda c, n: Status.killed if c == baseline and n in killed else None)
    assert machine.run().missing_blocks == {}
    assert len([block for block in machine.blocks if not block.first_position]) == 6


def test_a_cell_that_is_killed_again_and_again_is_given_up_and_the_others_go_on() -> None:
    plan = sweep(*FOUR)
    victim = next(c for c, e in plan.entries.items() if e.baseline_id != c)
    machine = Machine(plan, lambda c, n: Status.killed if c == victim else None)
    state = machine.run()
    assert (state.missing_blocks, list(state.not_measured)) == ({}, [victim])
    assert Counter(r.cell_id for r in machine.records)[victim] == 3


def test_cells_without_a_working_baseline_are_measured_all_the_same() -> None:
    plan = sweep("sharding=fsdp,zero2")
    [baseline] = [c for c, e in plan.entries.items() if e.is_added_baseline]
    machine = Machine(plan, lambda c, n: Status.failed if c == baseline else None)
    state = machine.run()
    counts = Counter(r.cell_id for r in machine.records)
    assert state.missing_blocks == {}
    assert counts == {baseline: 1, **dict.fromkeys(set(plan.entries) - {baseline}, 5)}


def test_a_machine_that_kills_every_other_run_comes_to_an_end() -> None:
    plan = sweep(*FOUR)
    machine = Machine(plan, lambda c, n: Status.killed if n % 2 else None)
    machine.run()
    assert len(machine.blocks) <= 2 * (5 + EXTRA_ROUNDS)


def mean_half_width(num_blocks: int, num_baseline_runs: int) -> float:
    """Mean half-width of the interval on a log ratio over 20,000 sweeps; runs vary by 1."""
    random = np.random.default_rng(11)
    cell = random.normal(size=(20_000, num_blocks))
    baseline = random.normal(size=(20_000, num_blocks, num_baseline_runs)).mean(axis=2)
    error = (cell - baseline).std(axis=1, ddof=1).mean() / np.sqrt(num_blocks)
    return float(error * t.ppf(0.975, num_blocks - 1))


@pytest.mark.parametrize(
    ("cells", "blocks_of_one", "blocks_of_two", "ratio"), [(4, 6, 5, 1.01), (8, 10, 9, 0.93)]
)
def test_a_second_baseline_run_hardly_narrows_intervals(
    cells: int, blocks_of_one: int, blocks_of_two: int, ratio: float
) -> None:
    assert blocks_of_one * (cells + 1) == blocks_of_two * (cells + 2), "equal cost"
    found = mean_half_width(blocks_of_two, 2) / mean_half_width(blocks_of_one, 1)
    assert found == pytest.approx(ratio, abs=0.01)


# --- Warm-up ------------------------------------------------------------------------------------


def warm_up(*overrides: str) -> str | None:
    plan = sweep(*overrides)
    state = resume_state(plan, (), sweep_settings(composer().compose().tree), TORCH)
    entry = warm_up_cell(next(blocks(plan, state.missing_blocks, 8)))
    return None if entry is None else entry.cell_id


def test_the_machine_is_warmed_up_where_intervals_are_compared() -> None:
    assert warm_up("sharding=ddp,fsdp") in sweep("sharding=ddp,fsdp").entries
    assert warm_up("sharding=ddp") is None, "one cell"
    assert warm_up("sharding=ddp,fsdp", "measurement=smoke") is None, "no intervals"
    assert warm_up("sharding=ddp,fsdp", "task=train") is None, "no run is short"


def test_the_baseline_warms_the_machine_up_wherever_it_stands_in_the_block() -> None:
    plan = sweep("sharding=ddp,fsdp", "precision=O1")
    [baseline] = {e.baseline_id for e in plan.entries.values()}
    orders = [BalancedOrder(seed=seed) for seed in range(6)]
    first = [next(blocks(plan, dict.fromkeys(plan.entries, 1), 8, order)) for order in orders]
    assert len({block.entries[0].cell_id for block in first}) > 1
    assert {entry.cell_id for block in first if (entry := warm_up_cell(block))} == {baseline}


def screenings_of(*overrides: str, **changes: Any) -> list[Block]:
    plan, settings = sweep(*overrides), sweep_settings(composer().compose().tree)
    state = resume_state(plan, (), settings, TORCH)
    return list(screenings(plan, state, replace(settings, **changes)))


def test_each_cell_is_screened_first_its_baseline_before_it() -> None:
    first = screenings_of("precision=O1,O2", "sharding=ddp,fsdp")
    assert all(block.is_screening for block in first)
    entries = [entry for block in first for entry in block.entries]
    assert [e.baseline_id == e.cell_id for e in entries] == [True, *[False] * 4]
    assert [block.first_position for block in first] == [*range(5)]
    assert len({block.name for block in first}) == 1
    two = Counter(block.name for block in screenings_of("precision=O1,O2,O3", cells_per_block=2))
    assert sorted(two.values()) == [2, 3]


def test_a_grid_begins_with_all_screening_runs() -> None:
    plan, settings = sweep(*FOUR), sweep_settings(composer().compose().tree)
    rounds = grid(plan, settings, (), CODE)
    first = [block for _ in range(5) for block in rounds.next(())]
    assert [block.is_screening for block in first] == [True] * 4 + [False]


def test_the_sentence_before_a_run_counts_screening_runs() -> None:
    plan = sweep("precision=fp32,O1,bf16", "sharding=ddp,fsdp")
    settings = sweep_settings(composer().compose().tree)
    rounds = grid(plan, settings, (), CODE)
    assert rounds.notice.startswith("6 screening runs")
    assert "at most 30 runs" in rounds.notice
    assert rounds.num_runs(()).total() == 6 + 30
    bounded = grid(plan, replace(settings, minutes=3.0), (), CODE)
    assert bounded.notice.startswith("6 screening runs")
    assert " for 3 min. " in bounded.notice
    assert bounded.notice.endswith(describe_least_blocks(plan))
    assert "4 blocks (5 cells" in bounded.notice


def test_what_needs_no_screening_gets_none() -> None:
    assert not screenings_of("sharding=ddp"), "nothing to compare with"
    assert not screenings_of("sharding=ddp,fsdp", "measurement=smoke"), "one block anyway"
    assert not screenings_of("sharding=ddp,fsdp", "measurement.blocks=5"), "typed"
    assert not screenings_of("sharding=ddp,fsdp", "task=train"), "no run is short"
    assert not screenings_of("sharding=ddp,fsdp", prune_slowdown=None)
    assert not screenings_of("sharding=ddp,fsdp", search="race")


def test_a_cell_has_one_screening_run_and_none_once_it_has_blocks() -> None:
    plan = sweep("sharding=ddp,fsdp")
    settings = sweep_settings(composer().compose().tree)
    screened = [run(c, "screening", 100, environment={"purpose": SCREENING}) for c in plan.entries]
    assert not list(screenings(plan, resume_state(plan, (), settings, TORCH, screened), settings))
    blocks = [run(c, "b0", 100) for c in plan.entries]
    assert not list(screenings(plan, resume_state(plan, (), settings, TORCH, blocks), settings))
    assert not BalancedOrder.after(screened)._past
