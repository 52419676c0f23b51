"""The race beside other ways to spend the same runs, on simulated landscapes.

    python benchmarks/racing.py --cells 96 --noise 0.03 --races 200 [--kind rugged] [--only race] [--keep]
                                [--front] [--predicted useful|useless] [--kills 20] [--rows FILE.csv]

The true log throughput of a cell is the sum of main effects (Student's t(3), 6 %), interactions of a
quarter of the pairs of techniques (4 %) and a residual of its own (0.7 %): heavier tails and sparser
effects than the race's model assumes. A run adds Gaussian noise, 10 % of runs are 15 %
slow, blocks drift (3 % from one to the next, 1 % within), and the first run of a block is 6 % slow.

Every method chooses one cell. Printed: how often its loss to the true best is at most 2 %, and its cost as a
share of the full grid's runs at 5 blocks, baseline and confirmation included.

`--kind`: what the race's model assumes even less. rugged: residuals of 2.5 %. lone: one cell is 8 % (or
`--lone`) faster than the best of all others, whatever its techniques. three_way: interactions of a
quarter of the triples of techniques (6 %). carry_over: each cell changes the throughput of the run after
it (3 %). uneven_noise: noises of cells differ by factors (log-normal, 0.7). `--all`: the start runs
every cell once.

`--front`: a Pareto front of throughput and peak memory. Half of the techniques change the memory (20 %), with
a residual of 1 % and a noise of 0.5 %. The loss of a front is the larger of how far a cell is outside it and
of how far a cell is better than one of its members in both figures.

`--predicted`: the race is given predictions, which are off by 10 % at random and by half of the effect of
each technique (useful), or are those of other cells (useless).

`--kills`: so many blocks of each race, of its first 25, are cut off after a random run, and a race that knows
nothing but the runs goes on.

`--rows FILE.csv` adds a line per race and method, and reports on all lines of the file: long simulations can
be run in parts, with `--first`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, concat, read_csv

from benchmarks.landscapes import KINDS, NUM_LEVELS, Floats, Landscape, Machine
from vitsweep.racing.conclusions import NEVER, Phase, Race, front_of
from vitsweep.racing.model import Design, Model

INDIFFERENCE, RUNS_PER_BLOCK, GRID_BLOCKS, CONFIRM = 0.02, 8, 5, 5
CELLS_PER_BLOCK = RUNS_PER_BLOCK - 1
"""Beside the baseline."""
BLOCKS_WITH_KILLS = 25
CAP = {96: 1.2, 2000: 0.16}
"""Runs after which a race is stopped, as a share of the full grid's."""


@dataclass
class Outcome:
    """What a race found."""

    leader: int
    runs: int
    settled: bool
    dropped: NDArray[np.bool_]
    seconds_per_round: float
    num_never_ran: int
    front: tuple[int, ...] = ()


def race(
    machine: Machine,
    seed: int,
    cap: float,
    predicted: Floats | None = None,
    kills: int = 0,
    starts_with_all: bool = False,
) -> Outcome:
    """Race until it is settled or `cap` runs are spent, confirmation included."""
    num = len(machine.landscape.truth)
    settings = [{str(f): str(v) for f, v in enumerate(row)} for row in machine.landscape.levels]

    def begun() -> Race:
        return Race(
            design=Design.of(settings, predicted),
            baseline_of=np.zeros(num, np.int64),
            block_size=RUNS_PER_BLOCK,
            indifference=INDIFFERENCE,
            seed=seed,
            starts_with_all=starts_with_all,
        )

    racing, num_blocks = begun(), 0
    killed = machine.random.choice(BLOCKS_WITH_KILLS, kills, replace=False) if kills else []
    left, rounds, began = np.full(num, NEVER), 0, time.process_time()
    while True:
        step = racing.next(machine.runs, left)
        rounds += 1
        spent = machine.num_runs + 3 * CONFIRM + racing.block_size > cap
        if step.phase not in (Phase.start, Phase.race) or spent:
            break
        for block in step.blocks:
            num_blocks += 1
            if num_blocks in killed:
                machine.block(block, int(machine.random.integers(1, RUNS_PER_BLOCK)))
                racing = begun()
                break
            machine.block(block)
    seconds = (time.process_time() - began) / rounds
    verdict = step.verdict or racing.verdicts(machine.runs, left)[-1]
    confirmed = 3 * CONFIRM if verdict.leader else 2 * CONFIRM
    if verdict.front:
        confirmed = len({0, *verdict.front}) * CONFIRM
    return Outcome(
        verdict.leader,
        machine.num_runs + confirmed,
        step.phase is Phase.settled,
        ~verdict.alive,
        seconds,
        int((verdict.num_runs == 0).sum()),
        verdict.front,
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
        land = Landscape.drawn(options.cells, options.kind, random, options.lone)
        if options.front:
            rows.extend(_fronts(land.with_cost(random), options, number, random))
            continue

        def new(land: Landscape = land, random: np.random.Generator = random) -> Machine:
            return Machine(land, options.noise, random)

        def note(
            method: str,
            cell: int,
            runs: int,
            land: Landscape = land,
            number: int = number,
            **facts: Any,
        ) -> None:
            line = {"race": number, "method": method, "loss": land.loss(cell)}
            rows.append(line | {"share": runs / full, **facts})

        predicted = land.predicted(options.predicted, np.random.default_rng([7, number]))
        found = race(
            new(), number, CAP[options.cells] * full, predicted, options.kills, options.all
        )
        best = int(land.truth.argmax())
        note(
            "race",
            found.leader,
            found.runs,
            settled=found.settled,
            lost_best=bool(found.dropped[best]),
            seconds_per_round=found.seconds_per_round,
            never_ran=found.num_never_ran,
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


def _fronts(
    land: Landscape, options: argparse.Namespace, number: int, random: np.random.Generator
) -> list[dict[str, Any]]:
    """Return the rows of one race for a front, of random search at its cost, and of the full grid."""
    full = GRID_BLOCKS * options.cells
    found = race(Machine(land, options.noise, random), number, CAP[options.cells] * full)
    rows: list[dict[str, Any]] = [
        {
            "race": number,
            "method": "race",
            "loss": land.front_loss(found.front),
            "share": found.runs / full,
            "settled": found.settled,
            "lost_best": bool(found.dropped[land.truth.argmax()]),
            "seconds_per_round": found.seconds_per_round,
            "never_ran": found.num_never_ran,
            "front": len(found.front),
        }
    ]
    whole = round(full * (CELLS_PER_BLOCK + 1) / CELLS_PER_BLOCK)
    budgets = {"random search, equal runs": found.runs, "full grid, 5 blocks": whole}
    for method, budget in budgets.items() if options.only is None else ():
        machine = Machine(land, options.noise, random)
        at_random(machine, budget)
        fast, ran = machine.mean_ratios(), np.isin(np.arange(options.cells), machine.runs.cell)
        front = front_of(fast, -machine.mean_costs(), ran, float(np.log1p(INDIFFERENCE)))
        loss, share = land.front_loss(front), machine.num_runs / full
        line = {"race": number, "method": method, "loss": loss}
        rows.append(line | {"share": share, "front": len(front)})
    return rows


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
                "races": len(some),
                "within_2_percent": within,
                "standard_error": float(np.sqrt(within * (1 - within) / len(some))),
                "median_loss": float(some["loss"].median()),
                "loss_p95": float(some["loss"].quantile(0.95)),
                "share_of_grid": float(some["share"].mean()),
                "share_p90": float(some["share"].quantile(0.9)),
                **({"cells_on_front": float(some["front"].mean())} if "front" in some else {}),
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
    parser.add_argument("--kind", choices=KINDS, default="smooth")
    parser.add_argument("--lone", type=float, default=0.08)
    parser.add_argument("--front", action="store_true")
    parser.add_argument("--predicted", choices=["useful", "useless"])
    parser.add_argument("--all", action="store_true", help="the start runs every cell once")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--only", choices=["race"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first race")
    parser.add_argument("--rows", type=Path, help="CSV to which this part of the races is added")
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/racing-...json"
    )
    options = parser.parse_args()
    rows = simulate(options)
    if options.rows:
        known = [read_csv(options.rows)] if options.rows.exists() else []
        rows = concat([*known, rows], ignore_index=True)
        rows.to_csv(options.rows, index=False)
    races = rows[rows["method"] == "race"]
    settled, margin = races[races["settled"].astype(bool)], np.log1p(INDIFFERENCE)
    facts = {
        "races": len(races),
        "settled": len(settled) / len(races),
        **{
            f"wrong_when_settled_{name}": f"{int((some['loss'] > margin).sum())} of {len(some)}"
            for name, some in {
                "every_cell_ran": settled[settled["never_ran"] == 0],
                "some_cells_never_ran": settled[settled["never_ran"] > 0],
            }.items()
        },
        "true_best_dropped": float(races["lost_best"].astype(float).mean()),
        "cpu_seconds_per_round": float(races["seconds_per_round"].mean()),
        "most_cpu_seconds_per_round": float(races["seconds_per_round"].max()),
    }
    table = summary(rows)
    print(f"{options}\n{table.to_string(float_format='{:.3f}'.format)}\n{facts}")
    if options.keep:
        from benchmarks.kept import keep

        lone = f"{100 * options.lone:.0f}percent"
        kind = f"lone-{lone}" if options.kind == "lone" else options.kind
        more = [f"{options.predicted}-predictions"] if options.predicted else []
        more += ["every-cell-once"] if options.all else []
        more += ["front"] if options.front else []
        more += [f"{options.kills}-kills"] if options.kills else []
        noise = f"{100 * options.noise:.0f}percent"
        name = "-".join(["racing", str(options.cells), noise, kind, *more])
        keep(
            name,
            {
                "options": vars(options) | {"rows": None, "races": len(races)},
                "methods": table.to_dict("records"),
                "races": facts,
            },
        )


if __name__ == "__main__":
    main()
