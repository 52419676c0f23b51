"""What a command says where nothing can be redrawn."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.builders import run, table
from tests.cells import entry
from vitsweep.console import (
    WIDTH_IN_A_FILE,
    can_be_redrawn,
    flush,
    interrupts_to,
    open_console,
    periodic_status,
    print_lines,
    quiet_loggers,
    reader_has_gone,
    was_terminated,
)
from vitsweep.launchers.progress import Progress
from vitsweep.results.record import SCREENING, Status
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


def test_no_ratio_is_shown_before_a_block_has_run_the_baseline() -> None:
    base, fast = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {"base": "plain", "fast": "precision=O1"}, 4)
    progress.warming_up(base)
    progress.warmed_up(base)
    progress.ended(fast, run("fast", "b0", 105.0))
    progress.ended(base, run("base", "b0", 52.0))
    progress.ended(fast, run("fast", "b1", 103.0))
    assert isinstance(console.file, io.StringIO)
    said = [line.partition(": ")[2] for line in console.file.getvalue().splitlines()]
    assert said[0].startswith("plain ")
    ratios = [re.sub(r"[^0-9.x]+", " ", line).strip() for line in said[1:]]
    assert ratios == ["105", "52.0", "103 2.0x"]


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


@pytest.mark.parametrize(
    ("blocks", "end"), [(1, "(no interval)"), (2, "(no interval)"), (3, "so far")]
)
def test_only_a_ratio_that_gets_no_interval_in_the_end_says_so(blocks: int, end: str) -> None:
    typed = f"measurement.blocks={blocks}"
    base, fast = (
        replace(e, baseline_id="base") for e in (entry(typed), entry("precision=O1", typed))
    )
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {"base": "plain", "fast": "precision=O1"}, 2 * blocks)
    for number in range(blocks):
        for cell, speed in ((base, 100.0), (fast, 150.0)):
            progress.ended(cell, run(cell.cell_id, f"b{number}", speed))
    assert isinstance(console.file, io.StringIO)
    said = [line for line in console.file.getvalue().splitlines() if "as fast" in line]
    assert len(said) == blocks
    assert all(line.endswith(f"as fast {end}") for line in said)


def test_a_screening_run_shows_its_ratio_at_once() -> None:
    base, slow = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], slow.__dict__["cell_id"] = "base", "slow"
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {"base": "plain", "slow": "precision=O1"}, 2)
    progress.expects({"base": 6, "slow": 6})
    for cell, speed in ((base, 100.0), (slow, 2.0)):
        progress.started(cell)
        progress.ended(
            cell, run(cell.cell_id, "screening", speed, environment={"purpose": SCREENING})
        )
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-1]
    assert re.match(r"\[2/12\] precision=O1: 2.00 img/s, .* 0.020x as fast \(no interval\)", last)


def test_a_terminal_shows_the_ratio_so_far_in_a_line_per_run_and_what_runs_below() -> None:
    base, fast = (replace(e, baseline_id="base") for e in (entry(), entry("precision=O1")))
    base.__dict__["cell_id"], fast.__dict__["cell_id"] = "base", "fast"
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}, width=99)
    progress = Progress(console, {"base": "plain", "fast": "precision=O1"}, 8)
    with progress.shown():
        progress.started(base)
        progress.ended(base, run("base", "screening", 9.0, environment={"purpose": SCREENING}))
        progress.ended(fast, run("fast", "screening", 18.0, environment={"purpose": SCREENING}))
        records = []
        for number, ratio in enumerate((1.2, 1.4, 1.4)):
            pace = 10.0**number  # the machine's; a ratio of medians would be of other blocks
            records += [run("base", f"b{number}", 100.0 * pace)]
            records += [run("fast", f"b{number}", 100.0 * pace * ratio)]
        for record in records:
            progress.ended(base if record.cell_id == "base" else fast, record)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"\[2/8\] precision=O1: 18.0 img/s, .* 2.0x as fast \(no interval\)", shown)
    rows = cells(table(*records), {"base": "base", "fast": "base"}).set_index("cell_id")
    so_far = rows.loc["fast", "speedup"]
    last = rf"\[8/8\] precision=O1: 14,000 img/s, .* {so_far:.1f}x as fast so far\r?$"
    assert re.search(last, shown, re.M)
    assert "0 of 8 runs, " in shown


def test_a_run_shows_its_speed_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    cell = entry()
    console = Console(file=io.StringIO(), width=99)
    progress = Progress(console, {cell.cell_id: "a"}, 3)
    progress.reported(cell, Status.failed, "no", 5.0)
    progress.reported(cell, Status.measured, "", None)
    progress.reported(cell, Status.measured, "", 5.0, block="b0")
    progress.reported(cell, Status.measured, "", 5.0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "[1/3] a: failed: no", "[2/3] a: measured: ", "[3/3] a: 5.00 img/s", "[4/4] a: 5.00 img/s",
    ]  # fmt: skip
    progress.dropped(-2)
    assert progress.reached == "4 of 6 runs"
    progress.expects(7)
    assert progress.reached == "4 of 11 runs"
    bounded = Progress(console, {cell.cell_id: "a"}, 3, seconds=90.0)
    assert bounded.seconds_of_budget_left == 90.0
    bounded.reported(cell, Status.failed, "no", None)
    assert bounded.line().startswith("1 run, at most ")
    assert "[1] a: failed: no" in console.file.getvalue()


def piped() -> tuple[int, io.TextIOWrapper]:
    """Return the end of a pipe to read, and the other as a stream."""
    read, write = os.pipe()
    return read, os.fdopen(write, "w")


def test_a_reader_that_has_gone_is_noticed_and_the_rest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, stream = piped()
    monkeypatch.setattr(sys, "stdout", stream)
    assert not reader_has_gone()
    assert flush(3) == 3
    os.close(read)
    assert reader_has_gone()
    stream.write("dropped")
    assert flush(3) == 3
    assert not reader_has_gone()
    stream.close()


def test_what_is_left_to_print_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, stream = piped()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", stream)
    stream.write("nobody reads it")
    assert flush(0) == 0
    stream.close()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("x")
        assert flush(0) == 2
        full.flush()
    monkeypatch.undo()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_console_is_wide_elsewhere_and_prints_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_error in (False, True):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stderr" if is_error else "stdout", out)
        monkeypatch.delenv("COLUMNS", raising=False)
        console = open_console(stderr=is_error)
        assert (console.width, console.stderr) == (WIDTH_IN_A_FILE, is_error)
        console.print("[fp8] :smile: 5 \x1b[1m")
        assert out.getvalue() == "[fp8] :smile: 5 \\x1b[1m\n"
    monkeypatch.setenv("COLUMNS", "50")
    assert open_console().width == 50


def test_signals_are_taken_within_the_block_where_they_are_not_ignored() -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    plain = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts_to(lambda number, frame: taken.append(number)):
            os.kill(os.getpid(), signal.SIGINT)
            assert not was_terminated()
            os.kill(os.getpid(), signal.SIGTERM)
            assert was_terminated()
            with interrupts_to(lambda number, frame: None):
                assert was_terminated(), "of this command still"
        assert taken == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with interrupts_to(lambda number, frame: None):
            assert not was_terminated()
            thread = threading.Thread(target=lambda: interrupts_to(print).__enter__())
            thread.start()
            thread.join()
            assert signal.getsignal(signal.SIGTERM) is not print
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, plain)


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
    progress.ended(cell, run(cell.cell_id, "screening", 1.0, environment=facts))
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


CLOSED = """
import subprocess, sys
from vitsweep.console import prepare_streams
prepare_streams()
look = "import os; [os.fstat(number) for number in range(3)]"
sys.exit(subprocess.run([sys.executable, "-c", look]).returncode)
"""


NOTES = """
import warnings
from vitsweep.console import prepare_streams
prepare_streams()
for text in ("a", "b", "a"):
    with warnings.catch_warnings():  # after which Python has forgotten what it showed
        pass
    warnings.warn(text)
"""


def test_a_command_prints_each_note_once() -> None:
    done = subprocess.run([sys.executable, "-c", NOTES], capture_output=True, text=True, timeout=60)
    assert done.stderr == "Note: a\nNote: b\n"


def test_processes_of_a_command_without_streams_have_some() -> None:
    """Else the fork server of the ranks has none: its sockets get their numbers, and the logs of ranks."""
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(shell, timeout=300).returncode == 0
