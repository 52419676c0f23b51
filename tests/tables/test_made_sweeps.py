"""Sweeps made from known truth, as the documentation describes them, against what tables and answers say.

Ratios, intervals and Holm's levels are computed anew here, and sentences are read as a user reads them.
`python -m tests.tables.test_made_sweeps` prints the answers of each sweep.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from pandas import DataFrame
from scipy.stats import t as student

from tests.builders import from_runs, run, table
from vitsweep.report.answer import answers, next_command, winners
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.tables.render import cell_text
from vitsweep.tables.replicates import replicates
from vitsweep.tables.sweep_tables import SweepTables

LOSING = {*Status} - {Status.measured, Status.preempted}
RATIO = re.compile(
    r"(?P<middle>[\d.,]+(?:e-\d+)?)x(?: \[(?P<low>[^,\]]+(?:,\d{3})*(?:\.\d+)?), (?P<high>[^\]]+)\])?"
)
RATES = re.compile(r"([\d.,]+) against ([\d.,]+) img/s")
TYPED = "python -m vitsweep -m precision=a,b"


@dataclass
class Made:
    """One made sweep.

    Attributes:
        speeds: cell -> its true throughput, that of `base` included.
        runs: the records.
        baselines: cell -> its baseline.
        levels: how near shown levels come to the truth at a pace of 1; 0 where that is not known.
        covers: the intervals may be judged by the truth: noise is independent, nothing is lost by its size.
        seeds: the repetitions are seeds.
    """

    speeds: dict[str, float]
    runs: list[RunRecord] = field(default_factory=list)
    baselines: dict[str, str | None] = field(default_factory=dict)
    levels: float = 0.0
    covers: bool = True
    seeds: bool = False

    def block(
        self,
        number: int,
        generator: np.random.Generator,
        noise: float,
        pace: float = 1.0,
        only: list[str] | None = None,
        logs: dict[str, float] | None = None,
        **facts: object,
    ) -> None:
        """Run cells once; `logs` are added to their log throughput."""  # fmt: skip
        for cell in only if only is not None else self.speeds:
            log = generator.normal(0, noise) + (logs or {}).get(cell, 0.0)
            environment = {"code_hash": "new", "nodes_used": "n1", **facts}
            self.runs.append(run(cell, f"b{number}", self.speeds[cell] * pace * float(np.exp(log)),
                                 minute=number, precision=cell, environment=environment))  # fmt: skip

    def end(self, cell: str, numbers: list[int], status: Status) -> None:
        """Let the runs of a cell in some blocks end otherwise."""
        for place, one in enumerate(self.runs):
            if one.cell_id == cell and one.block in {f"b{n}" for n in numbers}:
                number = int(one.block[1:])
                self.runs[place] = run(cell, one.block, status=status, minute=number, precision=cell,
                                       environment=dict(one.environment))  # fmt: skip

    def tables(self) -> SweepTables:
        found = from_runs(table(*self.runs), self.baselines or dict.fromkeys(self.speeds, "base"))
        found.__dict__["commands"] = [{"replicate": "seed"}] if self.seeds else []
        return found


def plain(
    generator: np.random.Generator,
    cells: int,
    blocks: int,
    noise: float,
    spread: float = 0.2,
    **facts: object,
) -> Made:
    """Cells that differ from their baseline by about `spread`, in blocks of differing pace."""  # fmt: skip
    speeds = {"base": 200.0} | {
        f"c{n}": 200 * float(np.exp(generator.normal(0, spread))) for n in range(cells)
    }
    made = Made(speeds)
    for number in range(blocks):
        made.block(number, generator, noise, float(np.exp(generator.normal(0, 0.1))), **facts)
    return made


def stalled(generator: np.random.Generator, *cells: str) -> Made:
    """One run of each of these cells takes ten times as long."""
    made = Made({"base": 200.0, "c0": 260.0, "c1": 150.0, "c2": 199.0}, levels=0.01, covers=False)
    for number in range(5):
        made.block(number, generator, 0.002, logs=dict.fromkeys(cells if number == 2 else (), -2.3))
    return made


def ended(generator: np.random.Generator, cell: str, status: Status, every: bool = False) -> Made:
    """Two runs of a cell, or all, end otherwise."""
    made = plain(generator, 3, 6, 0.01)
    made.covers = False
    made.end(cell, [*range(6)] if every else [1, 4], status)
    return made


def several(generator: np.random.Generator, number: int) -> Made:
    """Several baselines."""
    made = Made({})
    for n in range(number):
        made.speeds |= {f"base{n}": 100.0 + n, f"c{n}": 130.0, f"d{n}": 100.0}
        made.baselines |= dict.fromkeys((f"base{n}", f"c{n}", f"d{n}"), f"base{n}")
    for block in range(5):
        made.block(block, generator, 0.01)
    for place, one in enumerate(made.runs):
        setting = {"resolution_px": 8 + int(one.cell_id[-1]), "precision": one.cell_id[:-1]}
        made.runs[place].spec.update(setting)
    return made


def over_seeds(generator: np.random.Generator, seeds: int, ratio: float) -> Made:
    """Seeds are the repetitions."""
    made = Made({}, seeds=True)
    for seed in range(seeds):
        own = float(np.exp(generator.normal(0, 0.01)))
        made.speeds |= {f"base{seed}": 100.0, f"c{seed}": 100 * ratio * own}
        made.baselines |= dict.fromkeys((f"base{seed}", f"c{seed}"), f"base{seed}")
    for block in range(3):
        made.block(block, generator, 0.005)
    for one in made.runs:
        one.spec.update({"seed": int(one.cell_id[-1]), "precision": one.cell_id[:-1]})
    return made


def days(generator: np.random.Generator, stall: bool) -> Made:
    """Two cells ran on a slow day alone; the baseline on a fast one, too."""
    made = Made({"base": 200.0, "c0": 260.0, "c1": 150.0}, levels=0.01)
    made.covers = not stall
    for number in range(3):
        made.block(
            number, generator, 0.002, 0.7, logs={"base": -2.3} if stall and number == 1 else {}
        )
    for number in range(3, 8):
        made.block(number, generator, 0.002, only=["base"])
    return made


def nodes(generator: np.random.Generator, requeued: bool) -> Made:
    """Blocks on two nodes, one of them slower; or a block whose second half moved to the slower one."""
    made = Made({"base": 200.0, "c0": 260.0, "c1": 150.0}, levels=0.01)
    for number in range(5):
        on, pace = (("n1", 1.0), ("n2", 0.8))[number > 2]
        made.block(number, generator, 0.002, pace, nodes_used=on)
    if requeued:
        made.block(5, generator, 0.002, only=["base"], nodes_used="n1")
        made.block(5, generator, 0.002, 0.5, only=["c0", "c1"], nodes_used="n2")
    return made


def chunks(generator: np.random.Generator, stall: bool) -> Made:
    """Four cells to a block, the baseline in each."""
    made = plain(generator, 12, 0, 0.0)
    made.levels, number = 0.01, 0
    made.covers = not stall
    for _ in range(5):
        for first in range(0, 12, 4):
            cells = ["base", *(f"c{n}" for n in range(first, first + 4))]
            logs = {"base": -1.0} if stall and number == 4 else {}
            made.block(number, generator, 0.002, only=cells, logs=logs)
            number += 1
    return made


def codes(generator: np.random.Generator) -> Made:
    """Three blocks of older code, of which the cells are twice as slow, do not count."""
    made = Made({"base": 200.0, "c0": 260.0, "c1": 150.0})
    for number in range(3):
        made.block(number, generator, 0.01, 0.5, logs={"c0": -0.7}, code_hash="old")
    for number in range(3, 8):
        made.block(number, generator, 0.01)
    return made


def correlated(generator: np.random.Generator, blocks: int) -> Made:
    """Each run resembles that of the block before."""
    made, logs = plain(generator, 3, 0, 0.0), dict.fromkeys(("base", "c0", "c1", "c2"), 0.0)
    made.covers = False
    for number in range(blocks):
        logs = {c: 0.5 * log + float(generator.normal(0, 0.01)) for c, log in logs.items()}
        made.block(number, generator, 0.0, logs=logs)
    return made


def screened(generator: np.random.Generator) -> Made:
    """Of one cell there is a screening run alone."""
    made = plain(generator, 2, 0, 0.0)
    made.speeds["c1"] = 10.0
    made.levels = 0.02
    made.block(0, generator, 0.001, purpose=SCREENING)
    for number in range(1, 6):
        made.block(number, generator, 0.001, only=["base", "c0"])
    return made


def tied(generator: np.random.Generator, noise: float) -> Made:
    """Nothing differs."""
    made = Made({"base": 200.0, "c0": 200.0, "c1": 200.0})
    for number in range(5):
        made.block(number, generator, noise)
    return made


def scaled(generator: np.random.Generator, ratio: float, noise: float) -> Made:
    """One ratio that is far from 1, or next to it."""
    made = Made({"base": 200.0, "c0": 200.0 * ratio})
    for number in range(5):
        made.block(number, generator, noise)
    return made


G = np.random.Generator
MADE: dict[str, Callable[[G], Made]] = {
    **{f"{c} cells, {b} blocks, {100 * n:g} % noise": (lambda g, c=c, b=b, n=n: plain(g, c, b, n))
       for c, b, n in ((1, 5, 0.01), (2, 5, 0.05), (4, 3, 0.01), (4, 5, 0.02), (4, 11, 0.02), (8, 5, 0.01),
                       (16, 5, 0.02), (60, 5, 0.02), (200, 3, 0.01), (4, 1, 0.02), (4, 2, 0.02),
                       (1, 20, 0.02))},
    **{f"{c} equal cells, {b} blocks": (lambda g, c=c, b=b: plain(g, c, b, 0.03, 0.0))
       for c, b in ((1, 5), (4, 5), (16, 5), (60, 5), (4, 3), (4, 11))},
    **{f"slower cells {n}": (lambda g, n=n: plain(g, 3, 5, n, 0.5)) for n in (0.001, 0.1)},
    **{f"any look, {c} cells, {b} blocks": (lambda g, c=c, b=b: plain(g, c, b, 0.01, any_look=True))
       for c, b in ((1, 3), (4, 3), (9, 3), (9, 4), (20, 4), (4, 7), (1, 15))},
    **{f"a stall of {' and '.join(c)}": (lambda g, c=c: stalled(g, *c))
       for c in (["base"], ["c0"], ["c2"], ["base", "c0"])},
    **{f"{c} {s} in two blocks": (lambda g, c=c, s=s: ended(g, c, s))
       for c, s in (("c0", Status.timed_out), ("base", Status.timed_out), ("c0", Status.killed),
                    ("c1", Status.preempted), ("c2", Status.out_of_memory))},
    **{f"{c} {s} in all": (lambda g, c=c, s=s: ended(g, c, s, True))
       for c, s in (("c0", Status.failed), ("base", Status.failed), ("c1", Status.diverged))},
    "wrong in the end": lambda g: ended(g, "c0", Status.wrong),
    **{f"{n} baselines": (lambda g, n=n: several(g, n)) for n in (2, 5)},
    **{f"{n} seeds at {r:g}": (lambda g, n=n, r=r: over_seeds(g, n, r))
       for n, r in ((3, 1.2), (5, 1.2), (5, 1.0), (2, 1.1))},
    "a slow day": lambda g: days(g, False),
    "a slow day and a stall": lambda g: days(g, True),
    "two nodes": lambda g: nodes(g, False),
    "a block that moved": lambda g: nodes(g, True),
    "chunks": lambda g: chunks(g, False),
    "chunks and a stall": lambda g: chunks(g, True),
    "older code": codes,
    "correlated, 5 blocks": lambda g: correlated(g, 5),
    "correlated, 16 blocks": lambda g: correlated(g, 16),
    "screened": screened,
    "a tie": lambda g: tied(g, 0.0),
    "a tie with noise": lambda g: tied(g, 0.02),
    **{f"{r:g} times": (lambda g, r=r, n=n: scaled(g, r, n))
       for r, n in ((1297.0, 0.05), (12.3, 0.03), (0.004, 0.04), (1 + 1e-6, 3e-8), (0.5, 0.05),
                    (0.98, 0.02))},
}  # fmt: skip


def number(text: str) -> float:
    return float(text.replace(",", ""))


def log_ratios(made: Made, cell: str) -> dict[str, float]:
    """Log ratios over the baseline by block, of measured runs of the newest code on the same nodes."""
    base = (made.baselines or dict.fromkeys(made.speeds, "base"))[cell]
    logs: dict[tuple[str, str], tuple[float, object]] = {}
    for one in made.runs:
        counts = one.status == Status.measured and one.environment["code_hash"] == "new"
        if counts and one.environment.get("purpose") != SCREENING:
            rate = float(one.metrics["images_per_second"])  # type: ignore[arg-type]
            logs[one.cell_id, one.block] = float(np.log(rate)), one.environment["nodes_used"]
    return {
        block: logs[cell, block][0] - logs[str(base), block][0]
        for c, block in logs
        if c == cell and (base, block) in logs and logs[base, block][1] == logs[cell, block][1]
    }


def holm(p: dict[str, float]) -> dict[str, bool]:
    """Which hypotheses are rejected at 5 % (Holm 1979)."""
    shown, rejects = dict.fromkeys(p, False), True
    for place, (cell, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        rejects = rejects and value < 0.05 / (len(p) - place)
        shown[cell] = rejects
    return shown


def expected(made: Made) -> Iterator[tuple[str, float, float, float, bool]]:
    """Yield each cell with at least three pairs, its ratio, own interval, and whether it is shown."""
    pairs = {c: np.array([*log_ratios(made, c).values()]) for c in made.speeds}
    families: dict[object, dict[str, float]] = {}
    bases = made.baselines or dict.fromkeys(made.speeds, "base")
    ended = {(r.cell_id, r.status) for r in made.runs[-len(made.speeds):]}  # fmt: skip
    for cell, d in pairs.items():
        if cell != bases[cell] and len(d) >= 3:
            error = max(d.std(ddof=1) / np.sqrt(len(d)), 1e-300)
            p_value = 2 * student.sf(abs(d.mean()) / error, len(d) - 1)
            families.setdefault(bases[cell], {})[cell] = p_value
    for family in families.values():
        for cell, is_shown in holm(family).items():
            d = pairs[cell]
            half = student.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
            ends = (float(np.exp(d.mean() + side * half)) for side in (0, -1, 1))
            if (cell, Status.wrong) not in ended:
                yield cell, *ends, is_shown


def check(made: Made) -> tuple[int, int]:
    """Hold a sweep's tables and sentences against its truth.

    Returns:
        Intervals that hold the truth, and all: the first of each baseline, since others share its noise.
    """
    tables = made.tables()
    cells = tables.cells
    rows = replicates(cells, "seed") if made.seeds else cells
    by_cell = rows.set_index("cell_id")
    any_look = bool(made.runs[0].environment.get("any_look"))
    loses = {r.cell_id for r in made.runs if r.status in LOSING}
    held, judged = 0, set[object]()
    for cell, ratio, low, high, is_shown in () if made.seeds or any_look else expected(made):
        row = by_cell.loc[cell]
        if row["status"] != Status.measured or not row["num_pairs"] or np.isnan(row["speedup"]):
            continue
        assert row["speedup"] == pytest.approx(ratio, rel=1e-9)
        assert row["num_pairs"] >= 12 or row["speedup_low"] == pytest.approx(low, rel=1e-7)
        assert row["num_pairs"] >= 12 or row["speedup_high"] == pytest.approx(high, rel=1e-7)
        claims = (
            {"faster" if ratio > 1 else "slower"} if is_shown else {"no difference shown", "equal"}
        )
        claims |= {"missing blocks"} if is_shown and loses else set()
        assert row["num_pairs"] >= 12 or row["claim"] in claims, cell
        base = (made.baselines or dict.fromkeys(made.speeds, "base"))[cell]
        if made.covers and base not in judged:
            judged.add(base)
            held += low <= made.speeds[cell] / made.speeds[str(base)] <= high
    for cell, speed in made.speeds.items() if made.levels else ():
        assert by_cell.loc[cell, "images_per_second"] == pytest.approx(speed, rel=made.levels), cell
    read_rows(rows)
    for text in answers(tables):
        read_answer(text, rows)
    wanted = next_command(rows, TYPED, cells)
    undecided = rows["claim"].isin(["no difference shown", "too few blocks", "too few repetitions"])
    assert not wanted or undecided.any() or (rows["claim"] == "screened").any()
    return held, len(judged)


def read_rows(rows: DataFrame) -> None:
    """Of each row a table shows a ratio within its brackets, and a claim that these do not contradict."""
    text = cell_text(rows)
    for place in text.index:
        shown = RATIO.match(text.loc[place, "speedup"]) if "speedup" in text else None
        claim = rows.loc[place, "claim"]
        if not shown or not shown["low"]:
            assert claim not in ("faster", "slower", "no difference shown")
            continue
        low, middle, high = (number(shown[name]) for name in ("low", "middle", "high"))
        assert low <= middle <= high
        places = {len(shown[name].partition(".")[2]) for name in ("low", "middle", "high")}
        assert len(places) == 1
        if claim in ("faster", "slower"):
            assert low > 1 if claim == "faster" else high < 1
        assert low > 0


def read_answer(text: str, rows: DataFrame) -> None:
    """What a sentence says of rows that the table shows: name, ratio, rates, claim and rank."""
    assert "nan" not in text
    assert "inf" not in text.replace("(no interval)", "")
    compared = rows[rows["speedup"].notna() & (rows["claim"] != "baseline")]
    faster = compared[compared["claim"] == "faster"]
    found = RATIO.search(text)
    if " fastest" in text.partition(":")[0]:
        first = faster.sort_values("speedup_low").iloc[-1]
        assert len(faster)
        assert found
        assert number(found["low"]) > 1
        assert " img/s" not in text or rates_fit(text, rows)
        assert (
            rows["baseline_cell_id"].nunique() > 1 or first["precision"] in text.partition(":")[0]
        )
    elif text.startswith("Nothing is shown to beat"):
        base = [
            b
            for b in rows["baseline_cell_id"].dropna().unique()
            if (faster["baseline_cell_id"] != b).all()
        ]
        assert base, "a cell is faster than its baseline"
        best = compared[compared["baseline_cell_id"].isin(base)]["speedup"].max()
        assert (" the highest estimate" in text) == (best >= 1)
        assert (" the next highest estimate" in text) == (best < 1)
        assert rates_fit(text, rows)
        if found and found["low"]:
            holds = number(found["low"]) <= 1 <= number(found["high"])
            assert (
                holds == (": no difference shown" in text or ": equal" in text)
                or ": missing blocks" in text
            )


def rates_fit(text: str, rows: DataFrame) -> bool:
    """Whether the quotient of both rates lies in the interval of the ratio, or it is said to be off."""
    rates, ratio = RATES.search(text), RATIO.search(text)
    if not (rates and ratio) or " times the baseline's" in text:
        return True
    quotient = number(rates[1]) / number(rates[2])
    spare = 1.02 if ratio["low"] else 1.12
    low, high = (number(ratio[end] or ratio["middle"]) for end in ("low", "high"))
    return low / spare <= quotient <= high * spare


def test_some_made_sweeps() -> None:
    """A drawn part of those below."""
    names = np.random.default_rng(66).permutation([*MADE])[:4]
    for name in [*names, "any look, 9 cells, 3 blocks", "a slow day and a stall"]:
        check(MADE[name](np.random.default_rng(1)))


@pytest.mark.full
def test_sixty_made_sweeps() -> None:
    assert len(MADE) >= 60
    held = every = 0
    for seed in (1, 2, 3):
        for name, make in MADE.items():
            try:
                found = check(make(np.random.default_rng(seed)))
            except AssertionError as error:
                raise AssertionError(f"{name}, seed {seed}") from error
            held, every = held + found[0], every + found[1]
    assert held / every > 0.9
    print(f"{held} of {every} intervals hold the truth.")


@pytest.mark.full
@pytest.mark.parametrize("cells", [1, 4, 16, 60])
def test_of_equal_cells_at_most_one_headline_in_twenty_names_a_winner(cells: int) -> None:
    """600 sweeps of five blocks, whose cells all equal their baseline."""
    generator, named = np.random.default_rng(cells), 0
    for _ in range(600 // 20):
        made = Made({})
        for sweep in range(20):
            own = [f"s{sweep}base", *(f"s{sweep}c{n}" for n in range(cells))]
            made.speeds |= dict.fromkeys(own, 100.0)
            made.baselines |= dict.fromkeys(own, own[0])
        for block in range(5):
            made.block(block, generator, 0.03)
        for one in made.runs:
            sweep, cell = re.match(r"s(\d+)(.*)", one.cell_id).groups()  # type: ignore[union-attr]
            one.spec.update({"resolution_px": 8 + int(sweep), "precision": cell})
        _, shown = winners(made.tables())
        assert len(shown) == 20
        named += int((~shown["fastest shown"].str.startswith("none")).sum())
    print(f"{cells} cells: {named} of 600 sweeps name a winner.")
    assert named <= 30


def main() -> None:
    """Print the answers of each sweep."""
    for name, make in MADE.items():
        made = make(np.random.default_rng(1))
        print(f"\n{name}")
        for text in answers(made.tables()):
            print(" ", text)


if __name__ == "__main__":
    main()
