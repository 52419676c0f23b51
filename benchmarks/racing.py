"""The race beside other ways to spend the same runs, on simulated landscapes.

    python benchmarks/racing.py --cells 96 --noise 0.03 --races 200 [--rugged] [--only race] [--keep]

The true log throughput of a cell is the sum of main effects (Student's t(3), 6 %), interactions of a
quarter of the pairs of techniques (4 %) and a residual of its own (0.7 %, or 2.5 % with `--rugged`): heavier
tails and sparser effects than the race's model assumes. A run adds Gaussian noise, 10 % of runs are 15 %
slow, blocks drift (3 % from one to the next, 1 % within), and the first run of a block is 6 % slow.

Every method chooses one cell. Printed: how often its loss to the true best is at most 2 %, and its cost as a
share of the full grid's runs at 5 blocks, baseline and confirmation included.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.racing.design import Design, Ints
from vitsweep.racing.model import Model, Runs
from vitsweep.racing.race import NEVER, Phase, Race

Floats = NDArray[np.float64]

INDIFFERENCE, RUNS_PER_BLOCK, GRID_BLOCKS, CONFIRM = 0.02, 8, 5, 5
CELLS_PER_BLOCK = RUNS_PER_BLOCK - 1
"""Beside the baseline."""
NUM_LEVELS = {96: [2] * 5 + [3], 2000: [2] * 8 + [3] * 2}
CAP = {96: 1.0, 2000: 0.16}
"""Runs after which a race is stopped, as a share of the full grid's."""


@dataclass(frozen=True)
class Landscape:
    """The truth: log throughput of each cell, cell 0 being the baseline."""

    truth: Floats
    levels: Ints

    @classmethod
    def drawn(cls, cells: int, rugged: bool, random: np.random.Generator) -> "Landscape":
        """Draw one; of a grid with more combinations than cells, the others do not exist."""
        num_levels = NUM_LEVELS[cells]
        levels = np.array(list(product(*map(range, num_levels))))
        if len(levels) > cells:
            rest = random.choice(np.arange(1, len(levels)), cells - 1, replace=False)
            levels = levels[np.r_[0, np.sort(rest)]]
        truth = random.normal(0, 0.025 if rugged else 0.007, cells)
        for factor, num in enumerate(num_levels):
            effect = np.r_[0, 0.06 * random.standard_t(3, num - 1)].clip(-0.5, 0.5)
            truth += effect[levels[:, factor]]
        for a, b in combinations(range(len(num_levels)), 2):
            if random.random() < 0.25:
                both = random.normal(0, 0.04, (num_levels[a], num_levels[b]))
                both[0], both[:, 0] = 0, 0
                truth += both[levels[:, a], levels[:, b]]
        return cls(truth, levels)

    def loss(self, cell: int) -> float:
        """Return how far a cell is below the best, log throughput."""
        return float(self.truth.max() - self.truth[cell])


@dataclass
class Machine:
    """Measures blocks of a landscape, with the faults of real machines."""

    landscape: Landscape
    noise: float
    random: np.random.Generator
    level: float = 0.0
    _rows: list[tuple[int, int, float, float]] = field(default_factory=list)

    def block(self, cells: Iterable[int]) -> None:
        """Run some cells in a random order."""
        random = self.random
        order = random.permutation(np.array(list(dict.fromkeys(cells))))
        num = len(order)
        self.level += random.normal(0, 0.03)
        log = self.landscape.truth[order] + self.level
        log += random.normal(0, 0.01) * np.linspace(-0.5, 0.5, num)
        log += random.normal(0, self.noise, num) + np.log(0.85) * (random.random(num) < 0.10)
        log[0] += np.log(0.94)
        number = self._rows[-1][1] + 1 if self._rows else 0
        self._rows += [
            (int(c), number, float(i == 0), y)
            for i, (c, y) in enumerate(zip(order, log, strict=True))
        ]

    @property
    def num_runs(self) -> int:
        """Runs so far."""
        return len(self._rows)

    @property
    def runs(self) -> Runs:
        """All runs so far."""
        cell, block, first, log = (
            map(np.array, zip(*self._rows, strict=True)) if self._rows else [np.zeros(0)] * 4
        )
        return Runs(cell.astype(np.int64), block.astype(np.int64), first, log)

    def mean_ratios(self) -> Floats:
        """Return each cell's mean log ratio to the baseline of its blocks; -inf where it never ran."""
        runs, num = self.runs, len(self.landscape.truth)
        base = np.zeros(int(runs.block.max()) + 1)
        of_base = runs.cell == 0
        base[runs.block[of_base]] = runs.log[of_base]
        counts = np.bincount(runs.cell, minlength=num)
        sums = np.bincount(runs.cell, runs.log - base[runs.block], minlength=num)
        return np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)


@dataclass
class Outcome:
    """What a race found."""

    leader: int
    runs: int
    settled: bool
    dropped: NDArray[np.bool_]
    seconds_per_round: float


def race(machine: Machine, seed: int, cap: float, **options: Any) -> Outcome:
    """Race until it is settled or `cap` runs are spent, confirmation included."""
    num = len(machine.landscape.truth)
    settings = [{str(f): str(v) for f, v in enumerate(row)} for row in machine.landscape.levels]
    racing = Race(
        design=Design.of(settings),
        baseline_of=np.zeros(num, np.int64),
        block_size=RUNS_PER_BLOCK,
        indifference=INDIFFERENCE,
        seed=seed,
        **options,
    )
    left, rounds, began = np.full(num, NEVER), 0, time.perf_counter()
    while True:
        step = racing.next(machine.runs, left)
        rounds += 1
        spent = machine.num_runs + 3 * CONFIRM + racing.block_size > cap
        if step.phase not in (Phase.start, Phase.race) or spent:
            break
        for block in step.blocks:
            machine.block(block)
    seconds = (time.perf_counter() - began) / rounds
    verdict = step.verdict or racing.verdicts(machine.runs, left)[-1]
    confirmed = 3 * CONFIRM if verdict.leader else 2 * CONFIRM
    return Outcome(
        verdict.leader,
        machine.num_runs + confirmed,
        step.phase is Phase.settled,
        ~verdict.alive,
        seconds,
    )


def at_random(machine: Machine, budget: int) -> None:
    """Run every cell once in random order beside the baseline, then again, until the budget is spent."""
    num = len(machine.landscape.truth)
    while machine.num_runs + 2 <= budget:
        deck = machine.random.permutation(np.arange(1, num))
        for start in range(0, len(deck), CELLS_PER_BLOCK):
            room = min(CELLS_PER_BLOCK, budget - machine.num_runs - 1)
            if room > 0:
                machine.block([0, *deck[start : start + room]])


def halving(machine: Machine, budget: int) -> int:
    """Successive halving (Jamieson and Talwalkar 2016): rungs of equal cost, the better half stays."""
    num = len(machine.landscape.truth)
    per_run = (CELLS_PER_BLOCK + 1) / CELLS_PER_BLOCK
    begin = next(
        k for k in range(num - 1, 1, -1) if k * np.ceil(np.log2(k)) * per_run <= budget or k == 2
    )
    live, repeats = machine.random.choice(np.arange(1, num), begin, replace=False), 1
    while len(live) > 1:
        for _ in range(repeats):
            for start in range(0, len(live), CELLS_PER_BLOCK):
                machine.block([0, *live[start : start + CELLS_PER_BLOCK]])
        live = live[np.argsort(-machine.mean_ratios()[live])][: len(live) // 2]
        repeats *= 2
    return int(live[0])


def tpe(machine: Machine, budget: int, seed: int) -> int:
    """Optuna's TPE, one run per trial, a baseline and a block per 8 trials; its best trial is the choice."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    levels = machine.landscape.levels
    index = {tuple(row): i for i, row in enumerate(levels.tolist())}
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True)
    )
    while machine.num_runs + 2 <= budget:
        trials = []
        for _ in range(min(CELLS_PER_BLOCK, budget - machine.num_runs - 1)):
            trial = study.ask()
            row = tuple(
                trial.suggest_categorical(str(f), list(range(int(column.max()) + 1)))
                for f, column in enumerate(levels.T)
            )
            if row in index:
                trials.append((trial, index[row]))
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if not trials:
            continue
        machine.block([0, *(cell for _, cell in trials)])
        latest = machine.runs.part(machine.runs.block == machine.runs.block.max())
        log = dict(zip(latest.cell.tolist(), latest.log.tolist(), strict=True))
        for trial, cell in trials:
            study.tell(trial, log[cell] - log[0])
    best = study.best_trial.params
    return index[tuple(best[str(f)] for f in range(levels.shape[1]))]


def simulate(options: argparse.Namespace) -> DataFrame:
    """Return `method, loss, share` of every method in every race, and facts of the races."""
    full = GRID_BLOCKS * options.cells
    rows: list[dict[str, Any]] = []
    for number in range(options.first, options.first + options.races):
        random = np.random.default_rng([options.seed, number])
        land = Landscape.drawn(options.cells, options.rugged, random)

        def new(land: Landscape = land, random: np.random.Generator = random) -> Machine:
            return Machine(land, options.noise, random)

        def note(method: str, cell: int, runs: int, land: Landscape = land, **facts: Any) -> None:
            rows.append({"method": method, "loss": land.loss(cell), "share": runs / full, **facts})

        found = race(new(), number, CAP[options.cells] * full)
        best = int(land.truth.argmax())
        note(
            "race",
            found.leader,
            found.runs,
            settled=found.settled,
            lost_best=bool(found.dropped[best]),
            seconds_per_round=found.seconds_per_round,
        )
        if options.only == "race":
            continue
        for method, choose in _others(found.runs, number).items():
            machine = new()
            note(method, choose(machine), machine.num_runs)
        machine = new()
        at_random(machine, round(full * (CELLS_PER_BLOCK + 1) / CELLS_PER_BLOCK))
        note("full grid, 5 blocks", int(machine.mean_ratios().argmax()), machine.num_runs)
        if options.cells <= 100:
            note("full grid, 5 blocks, the race's model", _by_model(machine), machine.num_runs)
    return DataFrame(rows)


def _others(budget: int, seed: int) -> dict[str, Callable[[Machine], int]]:
    def random_search(machine: Machine) -> int:
        at_random(machine, budget)
        return int(machine.mean_ratios().argmax())

    def random_with_model(machine: Machine) -> int:
        at_random(machine, budget)
        return _by_model(machine)

    return {
        "random search, equal runs": random_search,
        "random search, equal runs, the race's model": random_with_model,
        "successive halving, equal runs": lambda machine: halving(machine, budget),
        "Optuna TPE, equal runs": lambda machine: tpe(machine, budget, seed),
    }


def _by_model(machine: Machine) -> int:
    settings = [{str(f): str(v) for f, v in enumerate(row)} for row in machine.landscape.levels]
    return int(Model(Design.of(settings)).posterior(machine.runs).mean.argmax())


def summary(rows: DataFrame) -> DataFrame:
    """Return one row per method: how often within 2 %, with a standard error, losses and cost."""
    table = []
    for method, some in rows.groupby("method", sort=False):
        within = float((some["loss"] <= np.log1p(INDIFFERENCE)).mean())
        table.append(
            {
                "method": method,
                "within_2_percent": within,
                "standard_error": float(np.sqrt(within * (1 - within) / len(some))),
                "median_loss": float(some["loss"].median()),
                "loss_p95": float(some["loss"].quantile(0.95)),
                "share_of_grid": float(some["share"].mean()),
                "share_p90": float(some["share"].quantile(0.9)),
            }
        )
    return DataFrame(table)


def main() -> None:
    """Simulate, print the table, and keep it where `--keep` says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", type=int, choices=sorted(NUM_LEVELS), default=96)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--races", type=int, default=100)
    parser.add_argument("--rugged", action="store_true")
    parser.add_argument("--only", choices=["race"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first race")
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/racing-...json"
    )
    options = parser.parse_args()
    began = time.process_time()
    rows = simulate(options)
    races = rows[rows["method"] == "race"]
    facts = {
        "settled": float(races["settled"].astype(float).mean()),
        "true_best_dropped": float(races["lost_best"].astype(float).mean()),
        "seconds_per_round": float(races["seconds_per_round"].mean()),
        "cpu_seconds_per_race": (time.process_time() - began) / options.races,
    }
    table = summary(rows)
    print(f"{options}\n{table.to_string(float_format='{:.3f}'.format)}\n{facts}")
    if options.keep:
        from benchmarks.kept import keep

        kind = "rugged" if options.rugged else "smooth"
        name = f"racing-{options.cells}-{100 * options.noise:.0f}percent-{kind}"
        keep(name, {"options": vars(options), "methods": table.to_dict("records"), "races": facts})


if __name__ == "__main__":
    main()
