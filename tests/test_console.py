"""What a command says where nothing can be redrawn."""

import io
import logging
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.builders import run, table
from tests.cells import entry
from vitsweep.console import can_be_redrawn, periodic_status, print_lines, quiet_loggers
from vitsweep.launchers.progress import Progress
from vitsweep.results.record import SCREENING
from vitsweep.tables.cells import cells


class Written(io.StringIO):
    """A file that tells when a text was written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.awaited, self.seen = awaited, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.awaited in self.getvalue():
            self.seen.set()
        return written


def test_a_silent_command_says_what_it_does() -> None:
    out = Written("still [busy]\nstill [busy]")
    with periodic_status(lambda text: print(text, file=out), lambda: "still [busy]", 0.001):
        assert out.seen.wait(60)


def test_nothing_is_printed_after_the_block_and_where_there_is_nothing_to_say() -> None:
    out = io.StringIO()
    with periodic_status(lambda text: print(text, file=out), lambda: "", 0.001):
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("terminal", "kind", "redrawn"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)  # fmt: skip
def test_a_pipe_and_a_dumb_terminal_get_plain_lines(terminal, kind, redrawn) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": kind})
    assert can_be_redrawn(console) is redrawn


def test_a_terminal_breaks_sentences_between_words_and_no_command() -> None:
    command = "`python -m vitsweep -m +sweep=first measurement.blocks=8`"
    out = io.StringIO()
    said = f"A sentence of words. Another: {command}."
    print_lines(Console(file=out, force_terminal=True, width=40), [said, "Report: results"])
    lines = out.getvalue().splitlines()
    assert lines == ["A sentence of words. Another:", f"{command}.", "Report: results"]
    out = io.StringIO()
    print_lines(Console(file=out, width=40), [said])
    assert out.getvalue() == f"{said}\n", "a file has no width"


def test_the_line_names_what_runs() -> None:
    cell = entry()
    progress = Progress(Console(file=io.StringIO()), {cell.cell_id: "precision=O1"}, 4)
    assert progress.line().startswith("0 of 4 runs, ")
    assert "precision=O1" not in progress.line()
    progress.started(cell)
    assert progress.line().endswith("; precision=O1 runs for 0 s")


def test_after_a_warm_up_of_the_baseline_the_first_runs_show_their_ratio() -> None:
    base, fast = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {"base": "plain", "fast": "precision=O1"}, 4)
    progress.warming_up(base)
    progress.warmed_up(base, run("base", "b0", 50.0))
    progress.ended(fast, run("fast", "b0", 105.0))
    progress.ended(base, run("base", "b0", 52.0))
    progress.ended(fast, run("fast", "b1", 103.0))
    assert isinstance(console.file, io.StringIO)
    said = [line.partition(": ")[2] for line in console.file.getvalue().splitlines()]
    assert said[0].startswith("plain ")
    ratios = [re.sub(r"[^0-9.x]+", " ", line).strip() for line in said[1:]]
    assert ratios == ["105 2.1x", "52.0", "103 2x"]


LONG = "bf16_masters + adamw_fused + pooled + patch_embedding=linear + compile_blocks"


def test_every_line_of_a_measured_run_fits_80_columns() -> None:
    base, fast = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), width=200)
    progress = Progress(console, {"base": "baseline", "fast": LONG}, 108)
    lines = []
    for number in range(3):
        progress.warming_up(fast)
        progress.started(base)
        lines.append(progress.line())
        environment = {"purpose": SCREENING} if number else {}
        for cell, speed in ((base, 1234.0), (fast, 2345.0 * 10**number)):
            progress.ended(cell, run(cell.cell_id, f"b{number}", speed, environment=environment))
    assert isinstance(console.file, io.StringIO)
    lines += console.file.getvalue().splitlines()
    assert "as fast" in lines[-1]
    assert all(
        "compile_blocks" in line or "baseline" in line or "_blocks" in line for line in lines
    )
    assert max(map(len, lines)) <= 80, lines


def test_a_screening_run_shows_its_ratio_at_once() -> None:
    base, slow = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], slow.__dict__["cell_id"] = "base", "slow"
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {"base": "plain", "slow": "precision=O1"}, 2)
    progress.expects({"base": 6, "slow": 6})
    for cell, speed in ((base, 100.0), (slow, 2.0)):
        progress.started(cell)
        progress.ended(cell, run(cell.cell_id, "look", speed, environment={"purpose": SCREENING}))
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-1]
    assert re.match(r"\[2/12\] precision=O1: 2.00 img/s, .* 50x slower \(no interval\)", last)


def test_a_terminal_shows_the_ratio_so_far_in_a_line_per_run_and_what_runs_below() -> None:
    base, fast = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}, width=99)
    progress = Progress(console, {"base": "plain", "fast": "precision=O1"}, 8)
    with progress.shown():
        progress.started(base)
        progress.ended(base, run("base", "look", 9.0, environment={"purpose": SCREENING}))
        progress.ended(fast, run("fast", "look", 18.0, environment={"purpose": SCREENING}))
        records = []
        for number, ratio in enumerate((1.2, 1.4, 1.4)):
            pace = 10.0**number  # the machine's; a ratio of medians would be of other blocks
            records += [run("base", f"b{number}", 100.0 * pace)]
            records += [run("fast", f"b{number}", 100.0 * pace * ratio)]
        for record in records:
            progress.ended(base if record.cell_id == "base" else fast, record)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"\[2/8\] precision=O1: 18.0 img/s, .* 2x as fast \(no interval\)", shown)
    rows = cells(table(*records), {"base": "base", "fast": "base"}).set_index("cell_id")
    so_far = rows.loc["fast", "speedup"]
    last = rf"\[8/8\] precision=O1: 14,000 img/s, .* {so_far:.2g}x as fast \(no interval\)"
    assert re.search(last, shown)
    assert "0 of 8 runs, " in shown


def test_the_time_left_is_that_of_each_cells_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cell, other = entry(), entry("precision=O1")
    progress = Progress(Console(file=io.StringIO()), {cell.cell_id: "a", other.cell_id: "b"}, 0)
    progress.expects({cell.cell_id: 6, other.cell_id: 1})
    for run_of, seconds in ((cell, 4.0), (other, 100.0)):
        progress.started(run_of)
        now += seconds
        progress.ended(run_of, run(run_of.cell_id, "b0", 1.0))
    assert "about 20 s left" in progress.line()
    progress.started(cell)
    now += 3
    assert "about 17 s left" in progress.line()
    now += 300
    assert "about 16 s left" in progress.line(), "a run that hangs does not add to the rest"
    progress.expects({cell.cell_id: 1})
    assert f"{progress.reached}; a runs for" in progress.line(), "longer than expected"


def test_after_screening_the_time_left_is_that_of_a_run_without_the_start_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cell = entry("measurement.warmup_min_seconds=1", "measurement.min_seconds=2")
    progress = Progress(Console(file=io.StringIO()), {cell.cell_id: "a"}, 0)
    progress.expects({cell.cell_id: 6})
    progress.started(cell)
    now += 60
    facts = {"purpose": SCREENING, "run_seconds": 4.0}
    progress.ended(cell, run(cell.cell_id, "look", 1.0, environment=facts))
    assert "about 40 s left" in progress.line(), "5 runs of 4 + 1 + 2 s, and 1 s beside each"


def test_the_proof_of_a_first_run_is_not_expected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    one, two = entry(), entry("precision=O1")
    progress = Progress(Console(file=io.StringIO()), {one.cell_id: "a", two.cell_id: "b"}, 0)
    for cell, setup, compiling in ((one, 1.0, 0.0), (two, 4.0, 10.0)):
        seconds = {"setup_seconds": setup, "compile_seconds": compiling}
        took = {"run_seconds": 3.0 + setup + compiling}
        progress.ended(cell, run(cell.cell_id, "b0", 1.0, metrics=seconds, environment=took))
    progress.expects({two.cell_id: 4})
    assert "about 20 s left" in progress.line(), "4 runs of 3 + 1 s, and 1 s beside each"


def test_loggers_are_quiet_within_the_block_only(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao.some_kernel")
    with quiet_loggers("torchao"):
        logger.warning("not here")
        logger.error("broken")
    logger.warning("after")
    assert [record.message for record in caplog.records] == ["broken", "after"]


@pytest.mark.full
def test_importing_torchao_prints_nothing() -> None:
    """In a process of its own: it warns on its first import."""
    pytest.importorskip("torchao")
    code = (
        "from vitsweep.console import TORCHAO_IMPORT, quiet_loggers\n"
        "with quiet_loggers(*TORCHAO_IMPORT):\n    import torchao.float8"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
