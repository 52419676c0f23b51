"""No screen, page, chart or notebook prints a ratio without its interval, or the words that it has none."""

import html
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from rich.console import Console

import vitsweep
from tests.builders import run
from tests.cells import entry
from tests.noise import normal
from tests.report.test_sentences import SURE, of
from tests.sample_sweep import shares, sweep
from tests.tables.test_effects import AVERAGE, LEVELS, TOGETHER, grid, simulated
from vitsweep import extras
from vitsweep.charts import effects
from vitsweep.cli.main import run as front_door
from vitsweep.launchers.progress import Progress
from vitsweep.report.html import drawn
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.effects import effects as effects_table
from vitsweep.tables.sweep_tables import SweepTables

BARE = re.compile(
    r"(?<![\w.])(?!1\.00x)\d[\d,]*\.\d+x\b(?!\s\[[\d.]+, [\d.]+\]|[^.;]{0,30}no interval\)| as fast so far)"
)
"""A ratio without an interval, without the words, and of no sweep that goes on. A baseline's is 1.00x."""


def bare(text: str) -> list[str]:
    """The ratios of a text that have neither, each with what is around it."""
    plain = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
    return [plain[max(m.start() - 40, 0) : m.end() + 40] for m in BARE.finditer(plain)]


def in_svg(text: str) -> str:
    """What a chart says: its letters are outlines, with the text as a comment before each."""
    return " ".join(re.findall(r"<!-- (.*?) -->", text, re.DOTALL))


def made(folder: Path, scale: float = 1.0) -> Store:
    """Five blocks, two blocks, one screening run, missing blocks, another device, and predictions."""
    spec = {"optimizer": "adamw_loop", "num_tokens": 17, "images_per_step": 64}
    facts: dict[str, Any] = {"metrics": {k: v for k, v in shares(640.0, spec).items() if v}}
    facts["metrics"] |= {
        f"predicted_step_time{end}_ms": ms
        for end, ms in (("", 700.0), ("_low", 500.0), ("_high", 900.0))
    } | {"predicted_peak_gib": 0.9}
    facts["environment"] = {"predicted_at": "2026-10-20T09:00:00.000+00:00"}
    runs = [
        *of("base", [1] * 5, **facts), *of("sure", scale * np.array(SURE), **facts),
        *of("two", (1.21, 1.32), **facts), *of("noisy", (1.03, 2.6, 1.1, 2.5, 1.4), **facts),
        *of("O1", (1.12, 1.13, 1.12, 1.11, 1.13), optimizer="adamw_foreach", **facts),
        *of("base2", (1.08, 1.07, 1.09, 1.08, 1.07), precision="base", optimizer="adamw_foreach", **facts),
        *of("lost", SURE[:4], **facts),
        run("lost", "b4", status=Status.timed_out, reason="hung", precision="lost", minute=4),
        *of("far", [1.5] * 3, environment={"device": "V100"}),
    ]  # fmt: skip
    screened = [("base", 100.0), ("screened", 181.0)]
    runs += [
        run(c, "k", v, precision=c, minute=9, environment={"purpose": SCREENING})
        for c, v in screened
    ]
    return stored(folder, runs)


def stored(folder: Path, runs: list[RunRecord], **command: Any) -> Store:
    store = Store(folder).create()
    for record in runs:
        store.save_run(record)
    of_cell = dict.fromkeys((r.cell_id for r in runs), "base")
    store.append_command(
        {"baselines": of_cell, "cells": list(of_cell), "command": "typed"} | command
    )
    return store


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """Every text below a folder; a chart as what it says."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".md", ".tex"):
            yield str(path), path.read_text()
        elif path.suffix == ".svg":
            yield str(path), in_svg(path.read_text())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_the_walk_finds_what_it_is_for() -> None:
    for text in ("1.31x", "<td>0.96x</td>", "1.3x as fast", "12.5x [", "(1.8x)", "1.80x screened"):
        assert bare(text), text
    for text in ("1.31x [1.30, 1.32]", "0.96x\n(no interval)", "1.00x",
                 "about 0.56x as fast (screening run, no interval)", "n2x4", "2x"):  # fmt: skip
        assert not bare(text), text


def test_commands_and_pages(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(here / "results" / "s")
    made(here / "results" / "old", 1.2)
    commands = [["collect", "s"], ["report", "s"]]
    if "latex" in extras.FEATURES:
        commands.append(["report", "s", "--latex"])
    if "gate" in extras.FEATURES:
        commands.append(["gate", "s", "--against", "old", "--lenient"])
    for words in commands:
        assert front_door(words) in (0, 1, 3, 4), words
        shown = capsys.readouterr()
        assert not bare(shown.out + shown.err), words
    found = dict(files(here / "results"))
    assert sum("x [" in text for text in found.values()) >= 3
    assert {path: bare(text) for path, text in found.items() if bare(text)} == {}
    assert not bare(vitsweep.load("s")._repr_html_())


def test_every_chart(here: Path) -> None:
    every = [*map(sweep, ("speedups", "scaling", "sequences")), SweepTables.of(made(here / "few"))]
    figures = [(chart.name, figure) for one in every for chart, figure, _ in drawn(one)]
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    found = effects_table(*simulated(logs, specs, normal(0.01)))
    figures += [
        ("effects", effects.draw(found)),
    ]
    said = [
        (name, " ".join(text.get_text() for text in figure.findobj(Text)))
        for name, figure in figures
    ]
    assert {name: bare(text) for name, text in said if bare(text)} == {}
    with_ratio = {name for name, text in said if "x [" in text or "x (no" in text or "x\n" in text}
    known = {
        "speedup",
        "waterfall",
        "effects",
        "optimizer_step",
        "gpu_scaling",
    }
    assert with_ratio == known


def test_the_status_screen_and_what_it_prints() -> None:
    base, fast, screened = (replace(entry(), baseline_id="base") for _ in range(3))
    for one, cell_id in ((base, "base"), (fast, "fast"), (screened, "screened")):
        one.__dict__["cell_id"] = cell_id
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}, width=80)
    progress = Progress(
        console, {"base": "plain", "fast": "precision=O1", "screened": "precision=O2"}, 4
    )
    with progress.shown():
        for cell, rate in ((base, 100.0), (screened, 181.0)):
            progress.ended(cell, run(cell.cell_id, "k", rate, environment={"purpose": SCREENING}))
        for block in range(3):
            for cell, rate in ((base, 100.0), (fast, 131.0)):
                progress.ended(cell, run(cell.cell_id, f"b{block}", rate))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "1.3x as fast so far" in shown
    assert "1.8x as fast (no interval)" in shown
    assert not bare(shown)
    assert max(map(len, re.sub(r"\x1b\S*?[A-Za-z]", "", shown).splitlines())) <= 80


def test_optional_features() -> None:
    said: list[Any] = []
    result: tuple[Any, ...] = ()
    if "compare" in extras.FEATURES:
        compared = extras.load("compare.comparison:compared")
        result = compared([0.27, 0.28, 0.27]), compared([0.27, 0.28])
    if "race" in extras.FEATURES:
        race_table, race_text = (
            extras.load(f"race.table:{n}") for n in ("race_table", "race_text")
        )
        cells = [
            {"cell_id": c, "name": c, "blocks": [0], "gain": -0.2 * n} for n, c in enumerate("ab")
        ]
        said.append(
            race_text(race_table({"cells": cells, "leader": "a", "runner_up": "b"})).to_string()
        )
    if "judge" in extras.FEATURES:
        verdict, answer = (extras.load(f"judge.verdict:{n}") for n in ("Verdict", "Answer"))
        for one in result:
            made_ = verdict(answer=answer.faster, base="base", head="head", speed=one, repeated=one)
            said += [made_.markdown(), *made_.sentences]
    if "bundle" in extras.FEATURES:
        claim, row = (
            extras.load("bundle.claims:Claim"),
            extras.load("bundle.reproduce:Reproduction"),
        )
        of_one = claim(cell_id="a", baseline_cell_id="b", cell="a", device="d", ratio=1.3, low=1.2, high=1.4,
                       num_pairs=5, claim="faster", margin=0.1)  # fmt: skip
        rows = [row(of_one, one) for one in result]
        said.append(extras.load("bundle.reproduce:as_table")(rows).to_string())
    if "take_home" in extras.FEATURES:
        measured = extras.load("take_home.prove:_measured")
        row = {"images_per_second": 9.0, "speedup": 1.3, "claim": "screened"}
        said += [*measured(row), *measured(row | {"speedup_low": 1.2, "speedup_high": 1.4})]
    said += [one.sentence("a", "b") for one in result]
    text = "\n".join(map(str, said))
    assert not bare(text)
    assert not result or text.count("1.32x (no interval)") >= 1


RATIOS = (
    "speedup effect gain ratio_to_average efficiency ratio step_ratio relative_throughput".split()
)


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("analysis/*.ipynb")), ids=lambda p: p.stem
)
def test_tables_of_notebooks(path: Path) -> None:
    """A column of ratios has columns with its ends, or its heading says that it has none."""
    outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
    pages = ["".join(o["data"]["text/html"]) for o in outputs if "text/html" in o.get("data", {})]
    heads = [re.findall(r"<th>(.*?)</th>", page.partition("</thead>")[0]) for page in pages]
    assert len(heads) >= 3
    for head in [h for h in heads if "img/s" not in h]:  # there a ratio is text
        for column in {*head} & {*RATIOS, *(f"published_{c}" for c in RATIOS)}:
            ends = {f"{column.removesuffix('_to_average')}_{end}" for end in ("low", "high")}
            assert ends <= {*head}, (column, head)
    assert not bare(" ".join(in_svg(str(o)) for o in outputs))
