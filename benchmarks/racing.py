"""How often the answer of a race is right, on simulated landscapes.

    python -m benchmarks.racing [--cells 96] [--races 200] [--slow 0.1] [--cold 0.06] [--seed 7] [--keep]

The true log throughput of a cell is the sum of main effects (Student's t(3), 6 %), interactions of a
quarter of the pairs of techniques (4 %) and a residual of its own (0.7 %). rugged: residuals of 2.5 %.
three_way: interactions of a quarter of the triples of techniques (6 %). carry_over: each cell changes the
throughput of the run after it (3 %). lone: one cell is 8 % or 15 % faster than the best of all others,
whatever its techniques. A run has Gaussian noise (0.5, 1.5 and 3 %); `--slow` of the runs are 15 %
slow, blocks drift (3 % from one to the next, 1 % within), and the first run of a block is slower by `--cold`.

Printed for each kind and noise: the share of races that are settled; of all races, those that are settled
on a cell more than 2 % below the best, and those whose leader is; and runs as a share of the full grid's at
5 blocks, its baselines included, before the fresh blocks and with them.
"""

import argparse
from dataclasses import dataclass
from datetime import date

import numpy as np
from pandas import DataFrame

from benchmarks.landscapes import NUM_LEVELS, Landscape, Machine
from vitsweep.extras.race.halving import Standing, standing, within_reach

INDIFFERENCE, RUNS_PER_BLOCK, GRID_BLOCKS, CONFIRM = 0.02, 8, 5, 5
LANDSCAPES = (
    *((kind, 0.0) for kind in ("smooth", "rugged", "carry_over", "three_way")),
    ("lone", 0.08),
    ("lone", 0.15),
)
NOISES = (0.005, 0.015, 0.03)


@dataclass(frozen=True)
class Outcome:
    """What a race found; `runs` are those before the fresh blocks."""

    leader: int
    is_settled: bool
    runs: int
    all_runs: int


def race(machine: Machine) -> Outcome:
    """Race over the cells of a landscape, of which cell 0 is the baseline."""
    out = np.zeros(len(machine.landscape.truth), bool)
    while (at := _standing(machine, out)).lacking:
        cells = machine.random.permutation(np.array(at.lacking))
        for some in np.array_split(cells, -(-len(cells) // (RUNS_PER_BLOCK - 1))):
            machine.block([0, *some.tolist()])
    chosen, runs = list(dict.fromkeys([*at.best[:2], 0])), len(machine.runs.log)
    for _ in range(CONFIRM):
        machine.block(chosen)
    fresh = machine.runs.part(slice(runs, None))
    others = [c for c in range(len(out)) if c not in at.best[:2]]
    reach = within_reach(at, at.best[0], others, fresh, 0, float(np.log1p(INDIFFERENCE)))
    return Outcome(at.best[0], not reach, runs, len(machine.runs.log))


def _standing(machine: Machine, out: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Standing:
    return standing(machine.runs, out, (0,))


def main() -> None:
    """Simulate, print the table, and keep it where `--keep` says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", type=int, choices=sorted(NUM_LEVELS), default=96)
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--slow", type=float, default=0.1)
    parser.add_argument("--cold", type=float, default=0.06)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/racing-...json"
    )
    options = parser.parse_args()
    cells, rows = options.cells, []
    grid = GRID_BLOCKS * (cells - 1 + -(-(cells - 1) // RUNS_PER_BLOCK))
    for kind, lone in LANDSCAPES:
        for noise in NOISES:
            found = []
            for number in range(options.races):
                random = np.random.default_rng([number, options.seed])
                land = Landscape.drawn(cells, kind, random, lone)
                done = race(Machine(land, noise, random, options.slow, options.cold))
                is_wrong = land.loss(done.leader) > np.log1p(INDIFFERENCE)
                found.append(
                    (
                        done.is_settled,
                        done.is_settled and is_wrong,
                        is_wrong,
                        done.runs / grid,
                        done.all_runs / grid,
                    )
                )
            means = np.mean(np.array(found, float), axis=0)
            name = f"lone {100 * lone:.0f} %" if lone else kind
            shares = "settled", "settled_and_wrong", "leader_wrong", "runs", "with_fresh_blocks"
            rows.append(
                {"kind": name, "noise": noise} | dict(zip(shares, means.tolist(), strict=True))
            )
            print(rows[-1], flush=True)
    print(DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    if options.keep:
        from benchmarks.kept import keep

        slow = f"{100 * options.slow:.0f}percent-slow-runs"
        facts = {"options": vars(options), "date": str(date.today()), "landscapes": rows}
        keep(f"racing-{cells}-{slow}", facts)


if __name__ == "__main__":
    main()
