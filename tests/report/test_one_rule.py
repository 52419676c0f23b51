"""The one rule of answers, from records in a folder to what `collect` and `report` say."""

import html
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import vitsweep
from tests.builders import run
from tests.said import opening
from vitsweep import extras
from vitsweep.cli.main import run as front_door
from vitsweep.report.answer import next_command
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import NO_PAIR
from vitsweep.tables.stats import Claim

BASE = (100.0, 101.0, 99.0, 100.5, 99.5)
SURE = (1.301, 1.299, 1.302, 1.298, 1.3)
NOISY = (1.0, 2.6, 1.1, 2.5, 1.4)


def of(cell: str, ratios: Any, base: Any = BASE, **facts: Any) -> list[RunRecord]:
    """Runs of a cell, named by its precision, in blocks with these ratios to the baseline."""
    facts = {"precision": cell} | facts
    pairs = enumerate(zip(ratios, base, strict=False))
    return [run(cell, f"b{n}", r and r * b, minute=n, **facts) for n, (r, b) in pairs]


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Store runs, `collect` them, and return what it says below the table, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def collected(
        *runs: list[RunRecord],
        baseline: dict[str, str] | str | None = "base",
        name: str = "s",
        replicate: str | None = None,
    ) -> str:
        store = Store(Path("results") / name).create()
        every = [r for some in runs for r in some]
        for record in every:
            store.save_run(record)
        of = (
            baseline
            if isinstance(baseline, dict)
            else dict.fromkeys((r.cell_id for r in every), baseline)
        )
        typed = {"baselines": of, "cells": list(of), "command": "typed", "replicate": replicate}
        store.append_command(typed)
        assert front_door(["collect", name]) == 0
        return " ".join(capsys.readouterr().out.split())

    return collected


def test_a_noisy_cell_with_a_higher_estimate_hides_no_winner(said: Any) -> None:
    text = said(of("base", [1] * 5), of("sure", SURE), of("noisy", NOISY))
    first, higher = text.split("; noisy ")
    assert re.search(r" sure \D* 1\.30x \[1\.30, 1\.30\] .*\b5 blocks .*\b2 cells", first)
    assert " 1.59x [" in higher
    assert (
        f"{Claim.no_difference_shown}, {say('noisy', noise=45, unit='block')}; its img/s are "
        in higher
    )
    assert "this machine" not in text
    assert next_command(vitsweep.load("s").cells, "typed") == "", "the fastest cell is known"


def test_what_belongs_to_a_ratio_stands_in_the_answer_and_in_the_report(said: Any) -> None:
    """The cell has 130 img/s and its baseline, measured again with newer code, 200."""
    old, new = ({"environment": {"code_hash": code}} for code in ("old", "new"))
    again = [
        replace(r, run_id=f"n{r.run_id}", block=f"n{r.block}") for r in of("base", [2] * 5, **new)
    ]
    for record in again:
        record.environment["started_at"] = record.environment["started_at"].replace("T10", "T11")
    note = "compared with older code of its baseline"
    text = said(of("base", [1] * 5, **old), of("sure", SURE, **old), again)
    assert re.search(rf"sure is fastest: 1.30x \[1.30, 1.30\] .* img/s; {note}[.;]", text)
    assert f'<div title="{note}' in Path(vitsweep.load("s").report()).read_text()


@pytest.mark.parametrize(
    ("top", "why"),
    [
        (of("top", (2.0, 2.1)), " 2.05x (no interval) .*2 blocks: too few blocks"),
        (
            [run(c, "screening", v, precision=c, environment={"purpose": SCREENING})
             for c, v in (("base", 100), ("top", 200))],
            "2.0x as fast .*: screened",
        ),
        (
            [*of("top", SURE[:4], [1.6 * b for b in BASE]),
             run("top", "b4", status=Status.timed_out, reason="hung", precision="top", minute=9)],
            ": missing blocks; .*1 of 5",
        ),
    ],
    ids=["two blocks", "a screening run", "missing blocks"],
)  # fmt: skip
def test_a_top_cell_without_a_claim_is_named_as_such(said: Any, top: Any, why: str) -> None:
    text = said(of("base", [1] * 5), of("sure", SURE), top)
    first, higher = text.split("; top ")
    assert re.search(r" sure \D* 1\.30x \[1\.30, 1\.30\]", first)
    assert re.search(why.replace("(", r"\(").replace(")", r"\)"), higher)


def test_no_figure_lies_outside_of_its_interval_though_another_cell_stalled(said: Any) -> None:
    stalled = of("other", (1.14, 1.16, 0.2, 1.15, 1.15))
    text = said(of("base", [1] * 5), of("sure", (1.15, 1.152, 1.149, 1.151, 1.148)), stalled)
    assert "sure is fastest: 1.15x [1.15, 1.15] " in text
    assert "correction" not in text


def test_cells_that_are_not_distinguished_are_named_together(said: Any) -> None:
    near = [r + 0.001 * (-1) ** n for n, r in enumerate(SURE)]
    far = [0.8 * r for r in SURE]
    text = said(of("base", [1] * 5), of("sure", SURE), of("near", near), of("far", far))
    assert "sure and near are " in text
    assert "statistically indistinguishable: sure 1.30x [" in text
    assert "far" not in text[text.index("statistically indistinguishable") :]


def test_no_cell_is_called_faster_than_another_where_longer_timing_may_explain_it(
    said: Any,
) -> None:
    for seconds, words in ((1.7, "sure is fastest: 1.30x"), (4.9, "sure and near are fastest")):
        windows = [{"metrics": {"window_seconds": s}} for s in (seconds, 1.7)]
        near = of("near", [0.985 * r for r in SURE], **windows[1])
        cells = of("base", [1] * 5, **windows[1]), of("sure", SURE, **windows[0]), near
        assert words in said(*cells, name=f"s{seconds:.0f}")


def test_the_first_of_clear_cells_is_fastest_wherever_its_rivals_ran(said: Any) -> None:
    other = [
        run(cell, f"x{n}", rate, precision=cell, minute=10 + n)
        for n, v in enumerate(BASE)
        for cell, rate in (("base", v), ("apart", v * (1.1 + n / 1e3)))
    ]
    text = said(of("base", [1] * 5), of("sure", SURE), other)
    assert "sure is fastest: 1.30x" in text, "no block of the two is shared"


def test_equal_cells_are_equal_and_not_slower(said: Any) -> None:
    tie = of("tie", (1.0, 1.0 + 1e-15, 1.0, 1.0 - 1e-15, 1.0))
    text = said(of("base", [1] * 5), tie)
    assert "1.00x [1.00, 1.00] equal" in text
    assert opening("none_shown", base="the baseline") + "; tie " in text
    assert "slower" not in text


def test_without_a_baseline_the_order_of_the_runs_changes_nothing(said: Any) -> None:
    cells = {
        "a": {"precision": "O1", "sharding": "ddp", "optimizer": "adamw_loop"},
        "b": {"precision": "fp32", "sharding": "fsdp", "optimizer": "adamw_fused"},
        "c": {"precision": "O2", "sharding": "zero1", "optimizer": "adamw_foreach"},
    }
    found = {
        text[text.index("all measured") :].partition(". ")[2]
        for order in permutations("abc")
        for text in [
            said(
                *(of(c, (1.0, 1.0, 1.0), **cells[c], environment={"started_at": f"2026-10-20T{h}:00:00"})
                  for h, c in enumerate(order, start=10)),
                baseline=None, name="".join(order),
            )
        ]
    }  # fmt: skip
    assert len(found) == 1, found
    assert re.match(r"O1 .*, O2 .* and fp32 ", found.pop())


def test_blocks_that_both_ran_in_are_not_called_never_shared(said: Any) -> None:
    def on(node: str) -> dict[str, Any]:
        return {"environment": {"nodes_used": node, "node": node}}

    apart = said(of("base", [1] * 3, **on("n1")), of("cell", [1.2] * 3, **on("n2")))
    empty = said(of("base", [1] * 3), of("cell", [None] * 3), name="empty")
    never = said(of("base", [1] * 3), [run("cell", "x", 200.0, precision="cell")], name="never")
    for text in (apart, empty, never):
        assert say("no_speedup", why=NO_PAIR) in text
        assert "never shared" not in text


def test_cells_of_two_devices_are_named_with_their_device(said: Any) -> None:
    """In each block the two cells ran on different devices, in turns."""
    devices = ("V100", "A100")
    cells = [
        run(c, f"b{n}", 100 * v + n, precision=c, minute=n,
            environment={"device": devices[(n + (c == "O1")) % 2]})
        for c, v in (("base", 1.0), ("O1", 1.2)) for n in range(6)
    ]  # fmt: skip
    text = said(cells)
    assert re.search(r" O1 on [VA]100 \D* 12\d img/s; ", text)
    assert "O1 on V100, at 12" in text
    assert "O1 on A100, at 12" in text
    assert "V100" not in said(of("base", [1] * 5), of("O1", SURE), name="one")


def test_weights_that_never_moved_are_named_next_to_the_claim(said: Any) -> None:
    frozen = of("frozen", SURE, validity={"unmoved_weights": True})
    text = said(of("base", [1] * 5), frozen)
    assert FLAGS["unmoved_weights"].caption in text
    whole = of("whole", SURE, validity={"unmoved_weights": False})
    assert "weights" not in said(of("base", [1] * 5), whole, name="whole")


def test_a_cell_that_lost_its_accuracy_is_no_winner(said: Any) -> None:
    def top1(value: float) -> dict[str, Any]:
        return {"metrics": {"accuracy_top1": value}, "task": "train"}

    base, fused = of("base", [1] * 5, **top1(0.97)), of("fused", SURE, **top1(0.30))
    text = said(base, fused)
    assert opening("none_shown", base="the baseline") + "; fused is faster, 1.30x" in text
    assert say("accuracy", own="30.0 %", base="97.0 %", how="one seed") in text
    slow = of("other", [0.9 * r for r in SURE], **top1(0.965))
    both = said(base, fused, slow, name="both")
    first, lost = both.split("; fused is faster, 1.30x")
    assert re.search(r" other \D* 1\.17x", first)
    assert say("accuracy", own="96.5 %", base="97.0 %", how="one seed") in first
    assert say("accuracy", own="30.0 %", base="97.0 %", how="one seed") in lost


def test_settings_are_distinguished_over_their_repetitions(said: Any) -> None:
    def seeds(name: str, *ratios: float, top1: float = 0.9) -> list[RunRecord]:
        return [
            run(f"{name}-{s}", f"s{s}b{b}", 100 * r * (1 + b / 1e4), minute=9 * s + b, precision=name,
                seed=s, metrics={"accuracy_top1": top1 + len(name) * s**2 / 1e5}, task="train")
            for s, r in enumerate(ratios, start=1) for b in range(3)
        ]  # fmt: skip

    runs = [*seeds("base", 1, 1, 1), *seeds("O1", 1.6, 1.61, 1.59), *seeds("O2", 1.3, 1.31, 1.29)]
    runs += seeds("O3", 1.8, 1.81, 1.79, top1=0.5)
    own = {r.cell_id: f"base-{r.cell_id[-1]}" for r in runs}
    text = said(runs, baseline=own, replicate="seed")
    first, lost = text.split("; O3 is faster, 1.80x")
    assert re.search(r" O1 \D* 1\.60x \[[^]]*\] over 3 seeds .*\b3 settings", first)
    assert say("accuracy", own="90.0 %", base="90.0 %", how="3 seeds: no worse") in first
    assert say("accuracy", own="50.0 %", base="90.0 %", how="3 seeds: worse") in lost
    near = [*runs[:9], *seeds("O1", 1.6, 1.61, 1.59), *seeds("O2", 1.61, 1.6, 1.595)]
    same = said(near, baseline=own, replicate="seed", name="near")
    fastest = "O1 and O2 are fastest, statistically indistinguishable"
    assert fastest in same.replace("O2 and O1", "O1 and O2")


def test_images_of_another_size_are_named_next_to_tflops(said: Any) -> None:
    small = {"metrics": {"model_tflops_per_rank": 0.5}}
    large = {"metrics": {"model_tflops_per_rank": 0.7}, "resolution_px": 32, "num_tokens": 257}
    text = said(of("base", [1] * 5, **small), of("cell", [0.2 * r for r in SURE], **large))
    assert say("other_size", own="32 px · 257 tokens", base="8 px · 17 tokens") in text
    assert "TFLOP/s per" in text  # the heading is folded
    same = said(of("base", [1] * 5, **small), of("cell", SURE, **small), name="same")
    assert "another size" not in same
    assert "TFLOP/s" not in same


def test_everything_that_shows_a_result_says_the_same(
    said: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(of("base", [1] * 5), of("sure", SURE), of("noisy", NOISY))
    [answer] = vitsweep.load("s").answers()
    assert answer in text
    assert answer in html.unescape(vitsweep.load("s")._repr_html_())
    assert front_door(["report", "s"]) == 0
    assert answer in html.unescape(Path("results/s/report/index.html").read_text())
    capsys.readouterr()
    said(of("base", [1] * 5, sweep="old"), of("sure", SURE, sweep="old"), name="old")
    if "gate" in extras.FEATURES:
        assert front_door(["gate", "s", "--against", "old", "--lenient"]) in (0, 1, 4)
        assert answer in capsys.readouterr().out
    if "latex" in extras.FEATURES:
        assert front_door(["report", "s", "--latex"]) == 0
        method = Path("results/s/report/method.tex").read_text()
        assert r"1.30$\times$ [1.30, 1.30] over 5 blocks (corrected for 2 cells)" in method
