"""Each sentence that states a result is printed from a made case, and rooms that print them have no other."""

import ast
import html
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame
from rich.console import Console

from tests.builders import from_runs, run, table
from tests.tables.test_first_losses import PLAIN, judged, measured
from tests.traced import METRICS, traced
from vitsweep import extras
from vitsweep.charts import scaling, speedup
from vitsweep.charts.style import NOTHING
from vitsweep.report.answer import answers, next_command, winners
from vitsweep.report.html import render
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.spec.model_spec import MEAN_OVER_PARTS
from vitsweep.tables.diagnostics import diagnostics
from vitsweep.tables.effects import effects
from vitsweep.tables.notes import START, empty_metrics
from vitsweep.tables.render import CellTable
from vitsweep.tables.replicates import replicates
from vitsweep.tables.scaling import scaling_efficiency
from vitsweep.tables.sentences import sentences
from vitsweep.tables.sweep_tables import SweepTables

HOUSE = Path(__file__).parents[2] / "vitsweep"
ROOMS = sorted(
    path
    for pattern in (
        "charts/*.py",
        "tables/*.py",
        "report/*.py",
        "extras/compare/comparison.py",
        "extras/predict/told.py",
        "extras/explain/**/*.py",
        "extras/gate/*.py",
        "extras/latex/*.py",
        "extras/limit/table.py",
        "extras/race/table.py",
        "extras/reference/shown.py",
        "extras/bundle/claims.py",
        "extras/bundle/reproduce.py",
        "extras/bundle/verb_*.py",
        "extras/judge/verdict.py",
        "extras/take_home/prove.py",
    )
    for path in HOUSE.glob(pattern)
    if not path.name.startswith("verb_")
)
PAGES = sorted(HOUSE.glob("**/templates/*.html.j2"))
MOST = 73
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
    return from_runs(table(*every), baselines)


def told(*runs: list[RunRecord], base: Any = "base") -> Iterator[str]:
    """The answer and the next command of these runs."""
    tables = tables_of(runs, base)
    yield from answers(tables)
    yield next_command(tables.cells, "python -m vitsweep")
    yield winners(tables)[0]


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
    yield extras.load("predict.told:prediction_sentence")(cells)


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
    yield from told(base, of("unsure", (1.024, 0.992, 0.978, 1.004, 1.002)))
    yield from told(base, of("noise", (0.7, 1.5, 0.9, 1.4, 0.8)))
    yield from told(*(on("purpose", [SCREENING], c, (r,)) for c, r in (("base", 1), ("fast", 1.8))))


def noted() -> Iterator[str]:
    """What stands beside a claim and below a table."""
    yield from shown(
        *(on("purpose", [SCREENING], c, (r,)) for c, r in (("base", 1), ("fast", 1.8)))
    )
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
    yield from shown(base, of("sure", SURE, metrics={"compile_seconds": 2.0}))
    many = [of(f"o{n}", (0.9, 1.1, 0.95, 1.05, 1.0)) for n in range(8)]
    yield from shown(base, of("likely", (1.02, 1.1, 1.06, 1.03, 1.12)), *many)
    yield from shown(base, of("large", SURE, resolution_px=32))
    starts = ({START: start, "metrics": {"peak_rss_gib": 0.2}} for start in ("forked", "spawned"))
    yield from shown(of("base", **next(starts)), of("sure", SURE, **next(starts)))
    yield from shown(of("base", (1.0, 0.5, 1.0)), of("sure", SURE[:3]), of("off", SURE[:2]))
    windows = ({"metrics": {"window_seconds": seconds}} for seconds in (1.5, 4.9))
    yield from shown(of("base", **next(windows)), of("sure", SURE, **next(windows)))
    yield from shown([run("base", status=Status.failed, precision="base")], of("sure", SURE))
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
        cells = from_runs(found, {}).cells
        limits, answer = (extras.load(f"limit.table:{n}") for n in ("limits", "limit_answer"))
        yield answer(limits(cells, "model.depth"), "model.depth")
    compared = extras.load("compare.comparison:compared")
    yield compared(2 * [0.02] * 4 + 2 * [-0.02] * 4).sentence("A", "B")
    yield compared(2 * [0.02, 0.02, 0.02, 0.02, -0.02, -0.02, -0.02, -0.02]).sentence("A", "B")


def explained_and_drawn() -> Iterator[str]:
    """What `explain` says of two cells and of one, and how charts are read."""
    explain_cells = extras.load("explain.causes:explain_cells")
    cell_roofline = extras.load("explain.roofline:cell_roofline")

    waiting, work = "waiting for ranks", "matrix products"
    late = [[0, 0, waiting, "all_reduce", "", 0, 90.0, 0.0], [1, 0, work, "mm", "", 1, 20.0, 1.0]]
    every = [
        traced(record, late, 20.0, critical_rank=1)
        for record in [*of("base", metrics=METRICS), *of("sure", SURE, metrics=METRICS)]
    ]
    tables = from_runs(table(*every), {"base": "base", "sure": "base"})
    for records in (every, every[:3] + every[5:8]):
        tables.__dict__["_records"] = {None: records}
        found = explain_cells(tables, "sure", "base", ("sure", "base"))
        yield from (found.sentence, *found.notes)
    alone = cell_roofline("sure", tables.cells.assign(device="NVIDIA H200").iloc[-1])
    yield from (alone.sentence, *alone.notes)
    sizes = {"world_size": 1}, {"world_size": 2, "resources.threads_per_rank": 1}
    cores = {"precision": "fp32", "resources.cores_per_node": 4, "resources.threads_per_rank": 4}
    ranks = [r for n, size in enumerate(sizes) for r in of(f"n{n}", ONE, 9 * n, **cores | size)]
    curves = scaling_efficiency(table(*ranks), {})
    yield from answers(from_runs(table(*ranks), dict.fromkeys(("n0", "n1"))))
    yield from (*curves["efficiency_note"], scaling.hollow(curves), str(speedup.SPEEDUP.reading))
    jobs = [
        run(f"j{n}", f"{n}{b}", 99.0 * n, minute=9 * n + b, world_size=n)
        for n in (1, 2)
        for b in (0, 1)
    ]
    yield from scaling_efficiency(table(*jobs), {})["efficiency_note"]
    yield judged(measured("base", PLAIN), measured("fast", (3.0, 2.2, 2.1)))["reason"].iloc[-1]
    grid = [
        *of("base"), *of("sure", SURE), *of("c", SURE, sharding="fsdp", optimizer="adamw_fused"),
        *of("d", SURE, sharding="zero1"),
    ]  # fmt: skip
    yield from effects(table(*grid), dict.fromkeys(("base", "sure", "c", "d"), "base"))["note"]


def gated() -> Iterator[str]:
    """What the gate says."""
    gate = extras.load("gate.gate:gate")
    cells = ((ONE, SURE), (ONE, SURE[:2]), (SURE, (0.2, 2.6, 0.3, 2.5, 1.4)))
    kept, few, odd = (table(*of("base", base), *of("sure", ratios)) for base, ratios in cells)
    baselines = {"base": "base", "sure": "base"}
    for runs in (kept, few, odd):
        found = gate(runs, kept, baselines=baselines)
        yield from (*found.sentences, found.verdict)


SENTENCE = re.compile(r"[A-Za-z]+ [a-z]+,? [a-z]+ [a-z]+")
TITLES = ("Chart", "title", "set_xlabel", "set_text", "set", "add_argument", "number", "flag")
"""Calls whose texts are a title, a label of an axis, or an option's help."""
NO_RESULTS = {
    "lag-1 correlation of blocks",  # a diagnostic
    "ran out of memory", "which are left out", "ran on other nodes than its baseline",  # how a block ended
    "more than on average", "less than on average",  # claims of an interaction
    "Strong scaling: images of a step fixed", "Weak scaling: images of a rank fixed",  # titles
    "forward of one spatial + one temporal block, per device; (N-1)/N of it is sent",  # a unit
    "` could not be drawn: ",  # warnings
    "One step of each cell under the profiler, in Chrome's format: drop a file on",  # how-to
    ", or open it in",
    "A cell that is already measured is not measured again;", "The sweep folder holds no command.",
    "By somebody else (or before this user's key was lost):",  # whose command it is
    " The same command goes on.",  # what to do next
    "Predicted, not measured. Bytes are per rank; step_time_low_ms and step_time_high_ms bound the interval "
    "of 80 %.",
    "Packages with other versions here (none is installed): ", "`claims.json` is not what the records say.",
    "all columns stand in the parquet file",  # of a refusal
    "timing both in turns, for ", "drawing weights and batches: ",  # progress of a proof
    "too noisy to say",  # the verdict on a claim
    "What was frozen for it is not shown: ", "it is not true or false for each row",  # refusals
}  # fmt: skip
"""Texts that state no result by themselves."""


def is_aside(node: ast.AST) -> bool:
    """Documentation, errors and warnings, names of columns, titles and labels."""
    if isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in (*TITLES, "warn", "split") or name.endswith("Error")


def words_in(source: str) -> list[str]:
    """Texts with four words and more that may state a result."""
    nodes = [*ast.walk(ast.parse(source))]
    aside = {id(part) for node in nodes if is_aside(node) for part in ast.walk(node)}
    aside |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    labels = [
        n.value
        for n in nodes
        if isinstance(n, ast.keyword) and n.arg and n.arg.endswith(("label", "marked"))
    ]
    aside |= {id(part) for label in labels for part in ast.walk(label)}
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in aside]
    return [t for t in texts if isinstance(t, str) and SENTENCE.search(t) and t not in NO_RESULTS]


def pattern(template: str) -> re.Pattern[str]:
    parts = Formatter().parse(template)
    return re.compile(
        "".join(re.escape(text) + (".*?" if field else "") for text, field, _, _ in parts)
    )


def raced() -> Iterator[str]:
    """What a race says: who leads, whether it is settled, what it cost."""
    cells = [{"cell_id": c, "name": f"x={c}", "blocks": [0]} for c in "pab"]
    race = {
        "rank_by": "throughput", "indifference": 0.02, "error": 0.01, "seconds": 300.0, "num_runs": 9,
        "grid_runs": 10, "grid_blocks": 5, "leader": "a", "runner_up": "b", "baseline": "p",
        "cells": cells, "open": [],
    }  # fmt: skip
    race_lines = extras.load("race.table:race_lines")
    fresh = {"num_blocks": 5, "speedup": 1.3, "speedup_low": 1.2, "speedup_high": 1.4}
    yield from race_lines(race | {"confirmed": {"p": fresh}})
    yield from race_lines(race | {"confirmed": {}, "open": ["b"]})
    yield from race_lines(race | {"confirmed": {}})


def paged() -> Iterator[str]:
    """What pages, LaTeX and the judge say."""
    ranks = [
        r
        for n, size in (("base", 1), ("two", 2))
        for r in of(n, ONE, precision="fp32", world_size=size, metrics={"communication_ms": 9.0})
    ]
    seeds = [r for s in range(3) for r in of(f"s{s}", ONE, 9 * s, precision="O1", seed=s)]
    for runs, key in ((ranks, ""), (seeds, "seed")):
        tables = tables_of([runs], {r.cell_id: runs[0].cell_id for r in runs})
        tables.commands[:] = [{"replicate": key}]
        page = render("s", tables, [], tables.exposed_communication if not key else NOTHING)
        yield html.unescape(page)
    yield extras.load("latex.latex:method")(tables_of([of("base"), of("sure", SURE)], "base"))
    there = {"source": "h200", "device": "NVIDIA H200", "driver": "1", "driver_there": "1"}
    empty = {"sm_clock_mhz": None, "power_capped_share": None}
    row = {
        "quotient": 0.8,
        "shared_device": False,
        **there,
        **empty,
        **{f"{c}_there": None for c in empty},
    }
    yield extras.load("reference.shown:slow")(DataFrame([row] * 3))
    verdict, answer = (extras.load(f"judge.verdict:{n}") for n in ("Verdict", "Answer"))
    yield from verdict(answer=answer.faster, base="b", head="h").sentences


def test_every_sentence_that_states_a_result_is_printed_from_a_made_case() -> None:
    for feature in (
        "compare", "predict", "explain", "gate", "race", "reference", "latex", "judge", "limit",
    ):  # fmt: skip
        pytest.importorskip(f"vitsweep.extras.{feature}")
    parts = (answered, noted, diagnosed, explained_and_drawn, gated, raced, paged)
    every = "\n".join(text for part in parts for text in part())
    known = {name: each["says"] for name, each in sentences().items()}
    known |= {
        f"flag {flag}": f"{f.caption[:1].upper()}{f.caption[1:]} (`{flag}`)."
        for flag, f in FLAGS.items()
    }
    unsaid = [name for name, says in known.items() if not pattern(says).search(every)]
    print(f"{len(known)} sentences, of which unsaid: {unsaid}")
    assert unsaid == []
    assert len(known) <= MOST
    assert all(each["fact"] for each in sentences().values())


def test_rooms_that_state_results_have_no_sentence_of_their_own() -> None:
    found = {f"{p.relative_to(HOUSE)}: {text}" for p in ROOMS for text in words_in(p.read_text())}
    assert len(ROOMS) > 40
    assert found == set()


def test_a_sentence_has_each_value_that_it_is_given() -> None:
    """`str.format` takes a value that no field asks for: a figure would be lost without an error."""
    seen = set()
    for path in HOUSE.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "say":
                if not isinstance(node.args[0], ast.Constant):
                    continue
                name = node.args[0].value
                given = {keyword.arg for keyword in node.keywords}
                fields = {field for _, field, _, _ in Formatter().parse(sentences()[name]["says"])}
                assert given - {None} <= fields, (name, path)
                assert None in given or given == fields - {None}, (name, path)
                seen.add(name)
    assert len(seen) > 40


def words_on(page: str) -> list[str]:
    """Texts of a template with four words and more that may state a result."""
    text = re.sub(
        r"(?s)<(style|script|title|h1|h2|h3|th|summary)\b.*?</\1>|\{[%#].*?[%#]\}|<[^>]*>",
        "|",
        page,
    )
    texts = [" ".join(part.split()) for part in re.split(r"\||\{\{.*?\}\}", text)]
    return [t for t in texts if SENTENCE.search(t) and t not in NO_RESULTS]


def test_pages_have_no_sentence_of_their_own() -> None:
    found = {f"{page.name}: {text}" for page in PAGES for text in words_on(page.read_text())}
    assert len(PAGES) > 1
    assert found == set()
    assert words_on("<p>Every cell of the sweep was measured.</p>")
    assert not words_on('<p class="a b c d">{{ say("a b c d") }}</p>')


def test_a_sentence_next_to_the_registry_is_found_wherever_it_stands() -> None:
    for planted in (
        'def f(x):\n    return f"{x} is faster than all the others."',
        'NOTE = "this cell was measured twice"',
        'def f(rows):\n    rows["note"] = [f"it took {n} blocks more than asked" for n in rows]',
        'CHART = Chart("name", "A title", table_of, draw, reading)\nreading = "Bars show the mean of all"',
    ):
        assert words_in(planted), planted
    assert not words_in('"""A docstring of some words."""\nraise E("an error of some words")')
    assert not words_in('CHART = Chart("name", "A title of some words", table_of, draw)')
