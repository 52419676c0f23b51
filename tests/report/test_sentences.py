"""Each sentence that states a result is printed from a made case, and rooms that print them have no other."""

import ast
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
from rich.console import Console

from tests.builders import run, table
from vitsweep.report.answer import answers, next_command
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import LOOK, RunRecord, Status
from vitsweep.spec.model_spec import MEAN_OVER_PARTS
from vitsweep.tables.comparison import compared
from vitsweep.tables.diagnostics import diagnostics, prediction_sentence
from vitsweep.tables.limits import limit_answer, limits
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.race import race_lines
from vitsweep.tables.render import CellTable
from vitsweep.tables.replicates import replicates
from vitsweep.tables.sentences import sentences
from vitsweep.tables.sweep_tables import SweepTables

HOUSE = Path(__file__).parents[2] / "vitsweep"
ROOMS = ("report/answer.py", "tables/diagnostics.py", "tables/speedup.py")
MOST = 60
BASE = (100.0, 101.0, 99.0, 100.5, 99.5)
ONE = (1.0, 1.0, 1.0, 1.0, 1.0)
SURE = (1.301, 1.299, 1.302, 1.298, 1.3)
NOISY = (1.0, 2.6, 1.1, 2.5, 1.4)


def of(cell: str, ratios: Any = ONE, minute: int = 0, **facts: Any) -> list[RunRecord]:
    """Runs of a cell, named by its precision, in blocks with these ratios to `BASE`."""
    facts = {"precision": cell} | facts
    return [
        run(cell, f"b{minute + n}", r and r * BASE[n % 5], minute=minute + n, **facts)
        for n, r in enumerate(ratios)
    ]


def tables_of(runs: Any, base: Any) -> SweepTables:
    every = [r for some in runs for r in some]
    baselines = base if isinstance(base, dict) else dict.fromkeys((r.cell_id for r in every), base)
    return SweepTables.from_runs(table(*every), baselines)


def told(*runs: list[RunRecord], base: Any = "base") -> Iterator[str]:
    """The answer and the next command of these runs."""
    tables = tables_of(runs, base)
    yield from answers(tables)
    yield next_command(tables.cells, "python -m vitsweep")


def shown(*runs: list[RunRecord], base: Any = "base", key: str = "") -> Iterator[str]:
    """What stands beside the answer: notes and footnotes of the table, diagnostics, predictions."""
    tables = tables_of(runs, base)
    cells = replicates(tables.cells, key) if key else tables.cells
    yield from answers(tables, cells)
    text = io.StringIO()
    Console(file=text, width=400).print(CellTable(cells, "s"))
    yield from text.getvalue().splitlines()
    yield from cells["speedup_note"].dropna()
    found = diagnostics(tables.runs, tables.baselines)
    yield from (*found["sentence"], *found["diagnostic"])
    yield prediction_sentence(cells)


def top1(value: float) -> dict[str, Any]:
    return {"metrics": {"accuracy_top1": value}, "task": "train"}


def on(column: str, values: str, cell: str, ratios: Any, **facts: Any) -> list[RunRecord]:
    """Runs of a cell whose environment has in turn these values of a column."""
    found = of(cell, ratios, **facts)
    for n, record in enumerate(found):
        record.environment[column] = values[n % len(values)]
    return found


def answered() -> Iterator[str]:
    """What the answer says: who is named, who is not and why."""
    base = of("base")
    yield from told(base, of("sure", SURE))
    yield from told(base, of("sure", SURE), of("noisy", NOISY))
    yield from told(
        base, of("sure", SURE), of("near", [r + 0.001 * (-1) ** n for n, r in enumerate(SURE)])
    )
    many = [of(f"o{n}", (0.9, 1.1, 0.95, 1.05, 1.0)) for n in range(8)]
    yield from told(base, of("likely", (1.02, 1.1, 1.06, 1.03, 1.12)), *many)
    yield from told(base, of("slow", [0.5 * r for r in SURE]))
    yield from told(of("base", **top1(0.97)), of("fused", SURE, **top1(0.3)))
    yield from told(base, of("sure", SURE, **top1(0.3)))
    two = [
        *of("b2", SURE, minute=9, sharding="fsdp"),
        *of("c2", 1.3 * np.array(SURE), minute=9, sharding="fsdp"),
    ]
    for record in two:
        record.spec["precision"] = "base" if record.cell_id == "b2" else "sure"
    of_two = {"base": "base", "sure": "base", "b2": "b2", "c2": "b2"}
    yield from told(base, of("sure", SURE), two, base=of_two)
    h200 = {"environment": {"device": "NVIDIA H200"}, "precision": "fp32"}
    yield from told(of("base", **h200), of("sure", SURE, environment=h200["environment"]))
    yield from told(base, base=None)
    yield from told(of("base", [None] * 3), base=None)
    yield from told([run("base", status=Status.failed)], base=None)
    apart = [run("alone", f"x{n}", 900.0, minute=20 + n, precision="alone") for n in range(3)]
    yield from told(base, apart)
    yield from told(base, of("sure", SURE), apart)
    yield from told(of("base", environment={"device": "V100"}), of("sure", SURE))
    nodes = [
        of(c, environment={"nodes_used": n, "node": n}) for c, n in (("base", "a"), ("sure", "b"))
    ]
    yield from told(*nodes)
    yield from told(base[:3], of("uncounted", [None] * 3))
    yield from told(base, of("two", (1.2, 1.3)))
    yield from told(base, of("unsure", (1.2, 0.98, 1.1, 1.02, 1.14)))
    yield from told(base, of("noise", (0.7, 1.5, 0.9, 1.4, 0.8)))
    yield from told(*(on("purpose", [LOOK], c, (r,)) for c, r in (("base", 1), ("look", 1.8))))


def noted() -> Iterator[str]:
    """What stands beside a claim and below a table."""
    yield from shown(*(on("purpose", [LOOK], c, (r,)) for c, r in (("base", 1), ("look", 1.8))))
    base = of("base")
    for status in (Status.timed_out, Status.out_of_memory):
        failed = [run("sure", "b4", status=status, reason="hung", precision="sure", minute=4)]
        yield from shown(base, of("sure", SURE[:4]), failed)
    yield from shown(base, of("sure", [*SURE[:4], None]))
    code = {"environment": {"code_hash": "old"}}, {"environment": {"code_hash": "new"}}
    new = of("base", ONE[:3], 5, **code[1])
    yield from shown(of("base", ONE[:3], **code[0]), new, of("sure", SURE[:3], **code[0]))
    yield from shown(
        of("base", ONE[:3], **code[0]),
        new,
        of("sure", SURE[:3], **code[0]),
        of("sure", SURE[:3], 5, **code[0]),
    )
    yield from shown(base, of("sure", SURE[:3], **code[0]), of("sure", SURE[3:], 3, **code[1]))
    phases = {"data_ms": 1.0, "forward_ms": 10.0, "backward_ms": 20.0, "optimizer_ms": 9.0}
    moved = [
        {p: v * (2 if p == "forward_ms" else 1) + n / 99 for p, v in phases.items()}
        for n in range(5)
    ]
    fused = [
        run(
            "f", f"b{n}", 60.0, metrics=dict(m), minute=n, precision="base", optimizer="adamw_fused"
        )
        for n, m in enumerate(moved)
    ]
    yield from shown(of("base", metrics=phases), fused)
    yield from shown(
        on("node", "ab", "base", [1] * 6),
        on("node", "ab", "far", (0.76, 1.3, 0.77, 1.31, 0.78, 1.29)),
    )
    yield from shown(base, of("large", SURE, resolution_px=32))
    yield from shown([run("base", status=Status.failed, precision="base")], of("sure", SURE))
    jobs = (
        of("base"),
        [run("sure", f"x{n}", 130.0, minute=9 + n, precision="sure") for n in range(3)],
    )
    for record in [r for some in jobs for r in some]:
        record.environment["paired"] = False
    yield from shown(*jobs)
    for last, wide in ((2, 0), (3, 5)):
        seeds = [
            run(f"{c}{s}", f"s{s}{b}", v * (1 + wide * s), minute=s, precision=c, seed=s)
            for s in range(3) for b in range(3)
            for c, v in (("base", 100.0 / (1 + wide * s)), ("O1", 130.0)) if (c, s) != ("base", last)
        ]  # fmt: skip
        bases = {r.cell_id: f"base{r.cell_id[-1]}" for r in seeds}
        yield from shown(seeds, base=bases, key="seed")
    diverged = [
        run("O1x", status=Status.diverged, precision="O1", seed=9),
        run("basex", precision="base", seed=9),
    ]
    narrow = [r for r in seeds if r.cell_id[:2] == "ba"]
    narrow += [replace(r, cell_id=f"O1{r.cell_id[-1]}", run_id=f"O{n}", spec=r.spec | {"precision": "O1"},
                       metrics={"images_per_second": 1.3 * r.metrics["images_per_second"]})
               for n, r in enumerate(narrow)]  # fmt: skip
    yield from shown(narrow, diverged, base=bases | {"O1x": "basex", "basex": "basex"}, key="seed")
    for proved in ("tokens=mine, which is compared with its", ""):
        both = of("base"), of("sure", SURE)
        for record in both[1]:
            record.validity["proved"] = (
                f"twin; not proved: {proved}" if proved else f"twin; {MEAN_OVER_PARTS}"
            )
        yield from shown(*both)
    flags = {"validity": dict.fromkeys(FLAGS, True)}
    yield from shown(of("base", **flags), of("sure", SURE, **flags))
    drift = [
        run(c, f"b{n}", v * (1 + n), precision=c, minute=n)
        for n in range(5) for c, v in (("base", 100.0), ("sure", 130.0)) if c == "base" or n > 1
    ]  # fmt: skip
    yield from shown(drift)
    own = table(*of("base", metrics={"mine": None}, environment={"mine_reason": "KeyError: 'x'"}))
    own.attrs["metrics"] = {"mine": ["J", "Mine", "lower", "own"]}
    yield from empty_metrics(own)


def diagnosed() -> Iterator[str]:
    """What is said of the blocks of a sweep, of predictions, of limits and of two settings in turns."""
    cold = [
        replace(
            run(c, f"b{n}", v * (0.8 if place == 0 else 1) * (1 + n * place / 999), minute=n),
            position=place,
        )
        for n in range(9)
        for cell, v in (("0", 100.0), ("1", 120.0), ("2", 110.0))
        for place, c in [((int(cell) + n) % 3, cell)]
    ]
    yield from shown(cold, base="0")
    for blocks in (10, 16):
        waves = 1 + 0.3 * np.sin(np.arange(blocks) / 2.5)
        yield from shown(of("base", [1] * blocks), of("alike", waves))
    yield from shown(of("base"), of("few", 1 + 0.01 * np.arange(5)))
    devices = on("device", ["V100"], "base", ONE), on("device", ["V100", "A100"], "mixed", SURE)
    yield from shown(*devices)
    predicted = {
        f"predicted_step_time_{end}ms": v for end, v in (("", 600), ("low_", 500), ("high_", 700))
    }
    yield from shown(
        of("base", metrics=predicted, environment={"predicted_at": "2026-10-20T09:00:00.000+00:00"})
    )
    for statuses in ([Status.measured, Status.out_of_memory], [Status.out_of_memory] * 2):
        found = table(
            *(
                run(f"d{d}", status=s, **{"model.depth": d})
                for d, s in zip((4, 8), statuses, strict=True)
            )
        )
        cells = SweepTables.from_runs(found, {}).cells
        yield limit_answer(limits(cells, "model.depth"), "model.depth")
    yield compared(2 * [0.02] * 4 + 2 * [-0.02] * 4).sentence("A", "B")
    yield compared(2 * [0.02, 0.02, 0.02, 0.02, -0.02, -0.02, -0.02, -0.02]).sentence("A", "B")


def words_in(path: Path) -> list[str]:
    """Texts of a file with four words and more that are neither documentation nor of an error."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    told = [n for n in nodes if isinstance(n, ast.Raise | ast.Expr)]
    aside = {id(part) for node in told for part in ast.walk(node)}
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in aside]
    words = re.compile(r"[a-z]+ [a-z]+,? [a-z]+ [a-z]+")
    return [text for text in texts if isinstance(text, str) and words.search(text)]


def pattern(template: str) -> re.Pattern[str]:
    parts = Formatter().parse(template)
    return re.compile(
        "".join(re.escape(text) + (".*?" if field else "") for text, field, _, _ in parts)
    )


def raced() -> Iterator[str]:
    """What a race says: who leads, whether it is settled, what it cost."""
    cells = [{"cell_id": c, "name": f"x={c}", "blocks": [0]} for c in "pab"]
    race = {
        "objective": "throughput", "indifference": 0.02, "error": 0.01, "seconds": 300.0, "num_runs": 9,
        "grid_runs": 10, "grid_blocks": 5, "leader": "a", "runner_up": "b", "baseline": "p",
        "cells": cells, "confirmed": {"p": {"num_blocks": 5, "speedup": 1.3}}, "open": [],
    }  # fmt: skip
    yield from race_lines(race)
    yield from race_lines(race | {"confirmed": {}, "open": ["b"]})


def test_every_sentence_that_states_a_result_is_printed_from_a_made_case() -> None:
    texts = [*answered(), *noted(), *diagnosed(), *raced()]
    known = {name: each["says"] for name, each in sentences().items()}
    known |= {
        f"flag {flag}": f"{f.caption[:1].upper()}{f.caption[1:]} (`{flag}`)."
        for flag, f in FLAGS.items()
    }
    clauses = {f"{room}: {words}": words for room in ROOMS for words in words_in(HOUSE / room)}
    every = "\n".join(texts)
    unsaid = [name for name, says in known.items() if not pattern(says).search(every)]
    unsaid += [name for name, words in clauses.items() if words not in every]
    print(f"{len(known)} sentences and {len(clauses)} clauses of rooms, of which unsaid: {unsaid}")
    assert unsaid == []
    assert len(known) <= MOST
    assert all(each["fact"] for each in sentences().values())
