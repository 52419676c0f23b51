"""The result table on terminals of several widths, kept as text in golden/."""

from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from pandas import DataFrame, Series
from rich.console import Console

from tests.builders import PLAIN, from_runs, run, table
from tests.said import opening
from tests.sample_sweep import sweep
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.spec.model_spec import MEAN_OVER_PARTS
from vitsweep.tables import render
from vitsweep.tables.cells import cells
from vitsweep.tables.notes import START, two_starts
from vitsweep.tables.render import CellTable, TextTable, cell_text, common_settings, footnotes
from vitsweep.tables.sentences import say

GOLDEN = Path(__file__).parent / "golden"
SHARED = {"shared_device": True}
SPEED = {"fp32": 1.0, "O1": 1.3, "O2": 1.6, "ddp": 1.0, "fsdp": 0.9}
SPEED |= {"adamw_loop": 1.0, "adamw_foreach": 1.004, "adamw_contiguous": 1.2}


def measured(grid: dict[str, tuple[str, ...]]) -> list[RunRecord]:
    """Return five runs of every cell of a full grid whose first cell is the baseline."""
    found: list[RunRecord] = []
    for choices in product(*grid.values()):
        pace = 1000.0
        for choice in choices:
            pace *= SPEED[choice]
        for block in range(5):
            noise = 1 + 0.02 * ((block * len(found) * 7 + block) % 11 / 5 - 1)
            spec = dict(zip(grid, choices, strict=True))
            found.append(run(" ".join(choices), f"b{block}", pace * noise, minute=block,
                             metrics={"peak_rss_gib": 0.5 + pace / 1e5}, **spec))  # fmt: skip
    return found


def compared(records: list[RunRecord], unrun: DataFrame | None = None) -> DataFrame:
    first = records[0].cell_id
    return cells(table(*records), {r.cell_id: first for r in records}, unrun)


def two_techniques() -> DataFrame:
    """Two techniques with a refused choice, a cell without memory and one with a flag."""
    grid = {"precision": ("fp32", "O1", "O2"), "sharding": ("ddp", "fsdp")}
    records = [r for r in measured(grid) if r.cell_id != "O2 fsdp"]
    records += [
        run("O2 fsdp", "b0", status=Status.out_of_memory, precision="O2", sharding="fsdp",
            reason="rank 1 asked for 9.1 GiB\n  beside 70.2 GiB that were allocated."),
        *[run("O1 fsdp", "b9", 1177, validity=SHARED, minute=9, precision="O1", sharding="fsdp")],
    ]  # fmt: skip
    reason = (
        "`sharding=none` trains on one rank and `resources.ranks_per_node=2`: use `sharding=ddp`, or "
        "one rank."
    )
    refused = [
        PLAIN | {"cell_id": f"{p} none", "status": "invalid", "reason": reason}
        | {"precision": p, "sharding": "none"}
        for p in ("fp32", "O1", "O2")
    ]  # fmt: skip
    return compared(records, DataFrame(refused))


def three_techniques() -> DataFrame:
    """Three techniques whose columns do not fit 80 columns side by side; one flag in all rows."""
    grid = {
        "precision": ("fp32", "O1", "O2"),
        "sharding": ("ddp", "fsdp"),
        "optimizer": ("adamw_loop", "adamw_foreach", "adamw_contiguous"),
    }
    records = measured(grid)
    for record in records:
        record.validity["shared_device"] = True
    return compared(records)


def hundred_cells() -> DataFrame:
    """Four batch sizes and 25 seeds; the last cells failed."""
    records = []
    for number in range(100):
        spec = {"batch": ("base", "blog_560")[number % 2], "seed": number // 2}
        failed = number >= 90
        status = Status.killed if failed else Status.measured
        reason = "rank 0 was ended by SIGKILL." if failed else ""
        records += [
            run(f"c{number}", f"b{b}", 1000 - 5 * number + b, status, reason, minute=b, **spec)
            for b in range(3)
        ]
    return cells(table(*records), {r.cell_id: "c50" for r in records})


SWEEPS = {
    "two_techniques": two_techniques,
    "three_techniques": three_techniques,
    "hundred_cells": hundred_cells,
    "several_baselines": lambda: sweep("scaling").cells,
}


@cache
def made(name: str) -> DataFrame:
    return SWEEPS[name]()


def printed(content: object, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(content)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def test_the_table_is_the_one_that_was_looked_at() -> None:
    """After a deliberate change: delete the file, run the test twice, look at the new one."""
    for width in [60, 80, 140]:
        for name in SWEEPS:
            path = GOLDEN / f"{name}_{width}.txt"
            text = printed(CellTable(made(name), name), width)
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
                pytest.fail(f"{path} is new: look at it")
            assert text == path.read_text(encoding="utf-8")
            assert max(map(len, text.splitlines())) <= width


def test_memory_over_two_starts_has_a_footnote_and_over_one_none() -> None:
    started: dict[str, dict[str, object]] = {
        start: {START: start} for start in ("forked", "spawned")
    }
    started |= {"early": {}, "with variables": {"runtime.variables.A": "b"}}

    def notes(base: str, own: str, metric: str = "peak_rss_gib") -> list[str]:
        records = [
            run(name, f"b{n}", speed + n, metrics={metric: 0.2}, precision=name, **started[start])
            for n in range(3) for name, speed, start in (("base", 90.0, base), ("O1", 95.0, own))
        ]  # fmt: skip
        found = from_runs(table(*records), {"base": "base", "O1": "base"}).cells
        return [note for note in footnotes(found)[1] if "memory" in note]

    said = two_starts("spawned", "forked", "the baseline's")
    for base, own in product(("forked", "early"), ("spawned", "with variables")):
        assert notes(base, own) == [f"[1] {said}"]
    assert notes("early", "forked") == notes("with variables", "spawned") == []
    assert notes("spawned", "spawned") == notes("forked", "spawned", "peak_allocated_gib") == []
    both = table(*(run(c, f"{c}{n}", 90.0, metrics={"peak_rss_gib": 0.2}, **{START: start})
                   for c, some in (("a", ("forked", "spawned")), ("b", ("spawned",)))
                   for n, start in enumerate(some)))  # fmt: skip
    cells = from_runs(both, {"a": "b", "b": "b"}).cells.set_index("cell_id")
    assert cells[START].to_dict() == {"a": "forked spawned", "b": "spawned"}
    said = two_starts("forked spawned", "spawned", "the baseline's")
    assert "forked and spawned" in said
    for base, is_noted in (("b", True), ("a", False)):  # a row is not compared with itself
        notes_of = footnotes(from_runs(both, {"a": base, "b": "b"}).cells)[1]
        assert any(note.endswith(said) for note in notes_of) == is_noted


def test_a_choice_that_was_compared_with_itself_is_named_below_the_table() -> None:
    records = measured({"precision": ("fp32", "O1")})
    told = {
        "fp32": "task=train after the timed steps",
        "O1": "tokens=mine, which is compared with itself",
    }
    for record in records:
        record.validity["proved"] = f"twin 1.0e-07; not proved: {told[record.cell_id]}"
    text = printed(CellTable(compared(records), "own"), 160)
    assert "[1] " + say("not_proved", what="tokens=mine, which is compared with itself") in text
    assert "timed steps" not in text
    for record in records:
        record.validity["proved"] = f"twin 1.0e-07; {MEAN_OVER_PARTS}"
    text = printed(CellTable(compared(records), "own"), 160)
    assert opening("mean_over_parts", mean=f"T{MEAN_OVER_PARTS[1:]}") in text


def test_long_headings_of_own_metrics_leave_room_for_the_accuracy() -> None:
    cost = {"usd_per_million_images": ["USD", "Cost of a million images", "lower", "own"]}
    records = measured({"precision": ("fp32", "O1"), "sharding": ("ddp", "fsdp")})
    for record in records:
        accuracy = 0.95 + 0.01 * ("O1" in record.cell_id)
        record.metrics.update(accuracy_top1=accuracy, usd_per_million_images=12.5)
    found = compared(records)
    found.attrs["metrics"] = cost
    narrow, wide = (printed(CellTable(found, "own"), width) for width in (80, 160))
    assert max(map(len, narrow.splitlines())) <= 80
    [head] = [line for line in narrow.splitlines() if line.startswith("cell")]
    assert "top-1" in head, narrow
    assert "million" in wide


def test_a_training_that_is_scored_by_its_loss_shows_it_where_others_show_top_1() -> None:
    records = measured({"precision": ("fp32", "O1")})
    for record in records:
        record.metrics.update(held_out_loss=0.1 + 0.0234 * (record.cell_id == "O1"))
    text = printed(CellTable(compared(records), "own"), 80)
    assert "held-out" in text
    assert "0.123" in text
    assert "top-1" not in text


def test_a_heading_is_all_that_shows_a_metric_in_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = measured({"precision": ("fp32", "O1")})
    for record in records:
        record.metrics["window_energy_j"] = 123.0
    found = compared(records)
    assert "J" not in cell_text(found)
    monkeypatch.setitem(
        METRICS, "window_energy_j", replace(METRICS["window_energy_j"], heading="J")
    )
    assert list(cell_text(found)["J"]) == ["123", "123"]
    assert " J" in printed(CellTable(found, "energy"), 160)


def test_headings_give_way_before_a_word_is_broken_and_numbers_never() -> None:
    """The widest interval of a plan leaves one character less than the longest choice has."""
    row = {
        "cell": "optimizer=adamw_fused", "state": "runnable", "runs": "5", "peak GiB": "0.31",
        "sent MB": "0", "step ms": "718 [321, 1,606]", "img/s": "1,205",
    }  # fmt: skip
    plan = DataFrame([row, row | {"cell": "precision=O2 sharding=fsdp (baseline)"}])
    lines = printed(TextTable(plan), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [
        line for line in lines if "optimizer=adamw_fused" in line and "718 [321, 1,606]" in line
    ]
    assert not any("precision=O2 sharding=fsdp (baseline)" in line for line in lines)
    narrow = printed(TextTable(plan), 72)
    assert max(map(len, narrow.splitlines())) <= 72
    assert narrow.count("718 [321, 1,606]") == 2


def test_every_row_is_shown_when_asked_for() -> None:
    text = printed(CellTable(made("hundred_cells"), "many", rows=100), 140)
    assert len(text.splitlines()) > 100
    assert "killed [1]" in text
    assert "--rows all" not in text


def test_a_sweep_of_refused_cells_has_no_table() -> None:
    found = made("two_techniques")
    text = printed(CellTable(found[found["status"] == "invalid"], "none"), 80)
    assert "img/s" not in text
    assert text.splitlines()[-2].startswith("3 cells: invalid: `sharding=none`")


def test_a_cell_that_has_not_run_yet_has_no_flag() -> None:
    records = [*measured({"precision": ("fp32", "O1")})]
    records.append(run("O1", "b9", 1300, validity=SHARED, minute=9, precision="O1"))
    waiting = DataFrame([PLAIN | {"cell_id": "O2", "status": "not run", "precision": "O2"}])
    text = printed(CellTable(compared(records, waiting), "waiting"), 80)
    (row,) = [line for line in text.splitlines() if line.startswith("O2")]
    assert row.split()[-2:] == ["not", "run"]
    assert "[1]" in text


def test_a_row_of_one_screening_run_says_what_it_showed() -> None:
    records = measured({"precision": ("fp32", "O1")})
    for cell, speed in (("fp32", 1000), ("O2", 40)):
        screening = {"environment": {"purpose": SCREENING}, "precision": cell}
        records.append(run(cell, "screening", speed, minute=9, **screening))  # type: ignore[arg-type]
    text = printed(CellTable(compared(records), "slow"), 80)
    (row,) = [line for line in text.splitlines() if line.startswith("O2")]
    assert "0.040x (no interval)  screened" in row
    assert "[1]" not in text


def test_blocks_are_counted_once_below_the_table() -> None:
    for purpose, done in ((SCREENING, "0 of 5"), ("", "3 of 5")):
        environment: dict[str, object] = {"purpose": purpose} if purpose else {}
        records = [
            run(cell, f"b{block}", speed, minute=block, environment=environment, precision=cell)
            for block in range(1 if purpose else 3)
            for cell, speed in (("fp32", 1000), ("O1", 100))
        ]
        found = compared(records).assign(**{"measurement.blocks": 5})
        text = printed(CellTable(found, "few"), 80)
        assert text.count("blocks: ") == 1
        assert f"; blocks: {done}." in text


def test_a_row_whose_shards_lie_on_one_rank_says_so() -> None:
    for sharding, ranks in (("fsdp", 8), ("fsdp", 1), ("ddp", 1)):
        spec = {"sharding": sharding, "world_size": ranks}
        found = compared(
            [run("base", f"b{block}", 1000, minute=block, **spec) for block in range(5)]
        )
        text = " ".join(printed(CellTable(found, "one"), 200).split())
        assert ("`sharding=fsdp` on one rank" in text) == ((sharding, ranks) == ("fsdp", 1))


def test_rows_of_several_devices_say_which() -> None:
    runs = [
        run(cell, f"{device}{n}", speed, environment={"device": device}, optimizer=optimizer)
        for device, fused in (("H100", 120), ("H200", 90))
        for n in range(3)
        for cell, optimizer, speed in (("b", "adamw_loop", 100), ("f", "adamw_fused", fused))
    ]
    lines = printed(CellTable(compared(runs), "two"), 150).splitlines()
    first, second = lines.index("H100"), lines.index("H200")  # headings
    assert [n for n, line in enumerate(lines) if line.startswith("adamw_fused")] == [
        next(n for n in range(start, len(lines)) if "adamw_fused" in lines[n])
        for start in (first, second)
    ]
    assert first < second


def test_markup_in_a_reason_is_text() -> None:
    runs = table(run("base", status=Status.failed, reason="[bold]see[/bold] [/nothing]"))
    assert "[1] [bold]see[/bold] [/nothing]" in printed(CellTable(cells(runs, {}), "one"), 80)
    assert "[red]" in printed(TextTable(DataFrame({"cell": ["[red]"]})), 80)


def test_a_cell_that_lacks_blocks_is_counted() -> None:
    def said(blocks: list[int | None], asked: list[int], **facts: object) -> list[str]:
        rows = {
            "status": "measured",
            "blocks": blocks,
            "measurement.blocks": asked,
            "claim": "faster",
        }
        return [*render._unfinished(DataFrame(rows | facts)).values()]

    assert said([2, 4], [5, 5]) == ["2 to 4 of 5"]
    assert said([4, 4], [5, 5]) == ["4 of 5"]
    assert said([6, 5], [5, 5], num_pairs=[6, 3]) == ["3 to 5 of 5"], "blocks of the interval"
    assert said([6, 4], [5, 5], claim=["baseline", "faster"]) == ["4 of 5"]
    assert said([5, 5], [5, 5]) == said([6, 5], [5, 5]) == []
    assert said([2, 4], [5, 3]) == []
    assert said([2, None], [5, 5]) == ["2 of 5"]
    assert said([2, 5], [5, 5], claim=["screened", "faster"]) == []
    assert said([2, 5], [5, 5], status=["failed", "measured"]) == []
    assert said([2, 4], [5, 5], replicates=2) == []
    assert said([], []) == []
    assert render._unfinished(DataFrame({"blocks": [2], "claim": ["faster"]})) == {}


def test_columns_are_kept_as_far_as_there_is_room() -> None:
    text = DataFrame(
        {"cell": ["abcd"], "img/s": ["1"], "result": ["x"], "step ms": ["123"], "peak GiB": ["1"]}
    )
    assert render._needed(text) == {"cell": 6, "img/s": 7, "result": 8, "step ms": 6, "peak GiB": 6}
    assert render._needed(text[:0]) == {
        "cell": 6,
        "img/s": 7,
        "result": 8,
        "step ms": 6,
        "peak GiB": 6,
    }
    for width, kept in ((0, 3), (24, 3), (25, 4), (30, 4), (31, 5)):
        assert render._fitted(text, width) == [*text][:kept], width
    many = DataFrame({c: ["1"] for c in ("cell", "result", *"abcdefgh")})
    assert render._fitted(many, 200) == [*many], "what fits is shown"
    mixed = text.assign(**{"peak GiB": "1" * 20, "blocks": "1"})
    assert render._fitted(mixed, 33) == ["cell", "img/s", "result", "step ms", "blocks"]


def test_groups_of_rows_stand_below_their_headings_in_the_order_of_their_numbers() -> None:
    text = DataFrame({"cell": ["a", "b", "c"], "result": ["x", "y", "z"]})
    match = Series(["16 ranks", "2 ranks", "16 ranks"])
    assert render._grouped(text, match)["cell"].tolist() == [
        "2 ranks",
        "b",
        "",
        "16 ranks",
        "a",
        "c",
    ]
    assert render._grouped(text, match)["result"].tolist() == ["", "y", "", "", "x", "z"]
    assert render.by_numbers("1,024 images of 2") < render.by_numbers("2,000 images of 1")


def test_settings_of_all_rows_stand_in_the_title() -> None:
    def common(**facts: object) -> list[str]:
        spec = {"sharding": "fsdp", "world_size": 4, "data": "digits"}
        return common_settings(
            DataFrame([PLAIN | spec | {"precision": p} for p in ("O1", "O2")]).assign(**facts)
        )

    assert common() == ["vit_nano", "digits", "4 ranks", "64 images", "fsdp"]
    assert common(sharding=["ddp", "fsdp"]) == ["vit_nano", "digits", "4 ranks", "64 images"]
    assert common(data=[None, "digits"], sharding="ddp") == ["vit_nano", "4 ranks", "64 images"]
    for parameters, told in ((2_345_678, "2.35 M"), (999_999, "999,999"), (1e6, "1 M")):
        assert told in common(model="mine", num_parameters=parameters)[0]
    assert common(model="mine", num_parameters=[1, 2])[0] == "mine"
    assert common(num_parameters=2_345_678)[0] == "vit_nano"


def test_intervals_of_families_times_to_target_and_repetitions() -> None:
    table = DataFrame({
        "speedup": 1.15, "claim_low": [1.1, 1.1, None, 1.1], "claim_high": [1.2] * 4,
        "family_size": [2, 1, 2, None],
    })  # fmt: skip
    assert render._families(table) == ["[1.10, 1.20] of 2", "", "", ""]
    assert render._replicates(DataFrame({"replicates": [3, 2], "replicates_asked": 3})) == [
        "3",
        "2 of 3",
    ]
    assert render._replicates(table) == [""] * 4

    def time(
        seconds: float | None, reached: int | None, missed: int | None, **facts: object
    ) -> str:
        row = {"status": "measured", "task.target_accuracy": 0.9, "seconds_to_target": seconds}
        row |= {"reached_target": reached, "missed_target": missed} | facts
        return render._times_to_target(DataFrame([row], dtype=object))[0]

    assert (time(12.34, None, None), time(12.34, 3, 0)) == ("12.3", "12.3")
    assert time(12.34, 3, 1).endswith(" 12.3 (3 of 4)")
    assert [word for word in time(None, 1, 3).split() if word.isdigit()] == ["3", "4"]
    assert time(None, 0, 3) == time(None, None, None) != ""
    assert (
        time(12.34, 3, 1, status="failed")
        == time(12.34, 3, 1, **{"task.target_accuracy": None})
        == ""
    )
    assert render._times_to_target(DataFrame({"seconds_to_target": [3.0]})) == [""]


def test_a_compile_time_is_reported_where_it_was_measured() -> None:
    for first, later, numbers in (
        (12.0, 3.0, ["12.0", "3.00"]),
        (12.0, 12.0, ["12.0"]),
        (0, 1, []),
        (None, 1, []),
    ):
        told = render._compiled({"first_compile_seconds": first, "compile_seconds": later})
        assert [word.strip(",") for word in told.split() if word[:1].isdigit()] == numbers
    assert render._compiled({}) == ""


def test_a_result_is_the_claim_or_the_status() -> None:
    row = {"status": "measured", "claim": "faster", "speedup": 1.2, "speedup_high": 1.3}
    unsure = row | {"claim": "no difference shown", "speedup_high": 3.0}
    rows = [row, row | {"claim": None}, row | {"status": "out_of_memory"}, unsure]
    assert render._results(DataFrame(rows)) == [
        "faster",
        "measured",
        "out of memory",
        "no difference shown",
    ]
    once, equal = render._said_once(
        DataFrame({"cell": ["a", "b"], "blocks": ["3", "3"], "step ms": ["1", "2"]})
    )
    assert (list(once), equal) == (["cell", "step ms"], {"blocks": "3"})
    assert render._said_once(DataFrame({"cell": ["a"], "blocks": ["3"]}))[1] == {}
    for rows, told in (([row] * 2, "2 cells, all measured"), ([row], "1 cell, measured")):
        assert render.tally_of(DataFrame(rows)) == told
    screened = row | {"claim": "screened"}
    counted = render.tally_of(DataFrame([row, screened, screened]), "more ")
    assert counted == "3 more cells: 2 screened, 1 measured"
    assert render._one_line("a\n b") == "a b"
    assert [len(render._one_line("x" * n)) for n in (300, 301)] == [300, 300]
    assert render._one_line(None) == ""
    assert render._one_line("word " * 70) == f"{' '.join(['word'] * 59)}…"


def test_a_table_has_its_title_and_its_headings_unless_they_are_left_out() -> None:
    def shown(table: TextTable, width: int = 60) -> list[str]:
        console = Console(width=width, file=StringIO())
        console.print(table)
        return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]

    text = DataFrame({"cell": ["a long name of a cell"], "img/s": ["1,234"], "result": ["faster"]})
    assert shown(TextTable(text))[0].split() == ["cell", "img/s", "result"]
    assert shown(TextTable(text, "Title"))[0] == "Title"
    assert shown(TextTable(text, show_header=False)) == ["a long name of a cell  1,234  faster"]
    folded = shown(
        TextTable(text.assign(cell="a long name of a cell that is folded"), show_header=False), 37
    )
    assert folded == ["a long name of a cell  1,234  faster", "that is folded"]
