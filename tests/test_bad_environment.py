"""A machine or a shell that is unusual: other locales, closed streams, full disks, Ctrl-C at any time.

Like `test_bad_input.py`, with processes of their own: each ends with an exit code and words that help.
"""

import ast
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.builders import run as record_of
from tests.command import QUICK, ROOT, Command, fault
from tests.launchers.test_local_faults import ranks_in, wait_for
from tests.small_disk import fill, small_disk
from vitsweep.results.store import Store


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Type a line with `vitsweep` in bash, as a process of its own."""
    vitsweep = f"{sys.executable} -m vitsweep"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("vitsweep", vitsweep)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
    )


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLAN = "vitsweep plan -m precision=O1,O2"
ONE_CELL = f"vitsweep {' '.join(QUICK)} sweep.baseline=null"
full = pytest.mark.full

ENVIRONMENTS = [
    ("vitsweep --help | head -1", {}, 0, "vitsweep: sweep the techniques"),
    ("vitsweep --help >&-", {}, 0, ""),
    ("vitsweep --help <&- >&- 2>&-", {}, 0, ""),
    ("vitsweep --help >/dev/full", {}, 2, "read or written"),
    ("vitsweep --help", ASCII, 0, "python -m vitsweep plan"),
    ("vitsweep precision=O1", {"PYTHONOPTIMIZE": "1"}, 2, "without them"),
    ("mkdir x && cd x && rmdir ../x && vitsweep status", {}, 2, "The current folder was removed"),
    pytest.param("vitsweep --config-dir nope", {}, 2, "no such folder below", marks=full),
    pytest.param("vitsweep --cfg job --package nosuch", {}, 2, "nosuch", marks=full),
    pytest.param(f"{PLAN} | head -1", {}, 0, "Plan of sweep", marks=full),
    pytest.param(f"{PLAN} >&-", {}, 0, "", marks=full),
    pytest.param(PLAN, {"TERM": "dumb"}, 0, "runnable 3", marks=full),
    pytest.param(f"env -u HOME {PLAN}", {}, 0, "runnable 3", marks=full),
    pytest.param(PLAN, {"HOME": "/proc"}, 0, "runnable 3", marks=full),
    pytest.param(f"{PLAN} \"sweep.name='über'\"", ASCII, 2, "must name a folder", marks=full),
    pytest.param(f"{ONE_CELL} \"sweep.question='ü ☃'\"", ASCII, 0, "img/s", marks=full),
    pytest.param(f"{ONE_CELL} | head -2", {}, 0, "Sweep vit_nano", marks=full),
    pytest.param(ONE_CELL, {"HOME": "/proc", "TMPDIR": "/nosuch"}, 0, "img/s", marks=full),
    pytest.param(f"{ONE_CELL} measurement.timeout_min=1e-4", {}, 3, "timed_out", marks=full),
    pytest.param(f"cd /proc && {ONE_CELL}", {}, 2, "`sweep.folder=DIR`", marks=full),
]
"""(line of shell, environment, exit code, words that are printed)."""


@pytest.mark.parametrize(("line", "environment", "code", "words"), ENVIRONMENTS)
def test_an_unusual_environment(
    line: str, environment: dict[str, str], code: int, words: str, tmp_path: Path
) -> None:
    done = shell(line, tmp_path, **environment)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    assert words in printed
    for unwanted in ("Traceback", "Exception ignored", "Warning:", "leaked"):
        assert unwanted not in printed
    if line.startswith(ONE_CELL):
        assert list(tmp_path.glob("results/*/cells/*/runs/*.json"))


PLACES = """
import multiprocessing.util, os, tempfile, torch

class Pictures:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert tempfile.gettempdir() == os.environ["TMPDIR"]
        if multiprocessing.parent_process():  # a loader's process
            sockets = multiprocessing.util.get_temp_dir()
            assert sockets.startswith("/tmp/pymp-")
            assert os.stat(sockets).st_mode & 0o777 == 0o700
        return torch.zeros(3, 32, 32), 0
"""


@pytest.mark.parametrize("variables", ["null", pytest.param("{A:1}", marks=full)])
def test_a_temporary_folder_with_a_long_path(variables: str, tmp_path: Path) -> None:
    """No socket fits there: those of ranks and loaders lie elsewhere, and user code keeps its `TMPDIR`."""
    (tmp_path / "places.py").write_text(PLACES)
    long = tmp_path / ("t" * 100)
    long.mkdir()
    data = "data=module data.target=places.Pictures data.native_resolution_px=32 data.num_workers=1"
    done = shell(
        f"{ONE_CELL} {data} runtime.variables={variables} batch.resolution_px=32",
        tmp_path,
        TMPDIR=str(long),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("results/*/cells/*/runs/*.json"))


@pytest.mark.full
@pytest.mark.parametrize("free_kib", [0, 40, 400])
def test_a_disk_that_fills_up_loses_nothing(vitsweep: Command, free_kib: int) -> None:
    with small_disk(vitsweep.folder / "disk") as disk:
        fill(disk / "filler")
        size = (disk / "filler").stat().st_size
        os.truncate(disk / "filler", size - 1024 * free_kib)
        asked = ("sweep.baseline=null", "sweep.report=true", f"sweep.folder={disk}")
        done = vitsweep(*asked)
        assert done.returncode in (2, 3), done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert os.strerror(errno.ENOSPC) in done.stdout + done.stderr
        kept = {run.run_id for run in Store(disk / "default").runs()}

        (disk / "filler").unlink()
        assert vitsweep(*asked, "sweep.retry=[failed,killed]").returncode == 0
        runs = list(Store(disk / "default").runs())
        assert kept <= {run.run_id for run in runs}
        assert any(run.status == "measured" for run in runs)


@pytest.mark.full
def test_ctrl_c_while_ranks_import_torch_stops_in_a_sentence(vitsweep: Command) -> None:
    running = vitsweep.start("sweep.baseline=null")
    wait_for(lambda: _fork_servers(running.pid))
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=400)
    assert running.returncode == 130, out + err
    assert "same command" in out + err
    assert "Traceback" not in out + err
    assert not ranks_in(vitsweep.folder)


@pytest.mark.full
def test_ctrl_c_twice_says_what_is_kept(vitsweep: Command) -> None:
    asked = ("sweep.baseline=null", *fault("Held"), "measurement.blocks=3")
    (vitsweep.folder / "allowed").write_text("1")
    running = vitsweep.start(*asked)
    wait_for((vitsweep.folder / "held").exists)
    before = {run.run_id for run in vitsweep.store.runs()}
    os.killpg(running.pid, signal.SIGINT)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=400)
    assert running.returncode == 130, out + err
    assert "is kept" in out + err
    assert "Traceback" not in out + err
    assert before <= {run.run_id for run in vitsweep.store.runs()}


def _fork_servers(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
        return [c for c in children if "multiprocessing.forkserver" in " ".join(c.cmdline())]
    except psutil.NoSuchProcess:  # a child such as git has ended meanwhile
        return []


def test_files_follow_the_umask_and_rendezvous_files_are_private(tmp_path: Path) -> None:
    from vitsweep.execution.rank_processes import rendezvous

    before = os.umask(0o002)
    try:
        store = Store(tmp_path / "shared").create()
        store.save_run(record_of("cell"))
        store.append_command({})
        modes = {p.stat().st_mode & 0o777 for p in store.root.rglob("*") if p.is_file()}
        with rendezvous() as meeting:
            folder = Path(meeting.removeprefix("file://")).parent
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert modes == {0o664}


SOURCES = [p for d in ("vitsweep", "hydra_plugins", "slurm") for p in (ROOT / d).rglob("*.py")]
OPENERS = ("open", "fdopen", "read_text", "write_text")


def test_every_text_file_names_its_encoding() -> None:
    """The encoding of the locale is another on some machine."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and _opens_text(call)
    ]
    assert not unnamed


def _opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    words = {keyword.arg for keyword in call.keywords}
    if name in ("run", "Popen") and "text" in words:
        return "encoding" not in words
    of_os = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("os", "Image")
    if isinstance(call.func, ast.Name) and name == "read_text":
        return False  # `vitsweep.files.read_text`, which reads UTF-8
    opens = name in OPENERS and not (of_os and name == "open") and not _is_of_data(call)
    modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
    binary = any(isinstance(mode, str) and "b" in mode and len(mode) < 4 for mode in modes)
    return opens and not binary and "encoding" not in words


def _is_of_data(call: ast.Call) -> bool:
    """`Data.open(cell, world)` opens no file, and neither does `cell.objective.open(cell)`."""
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return of.endswith("objective") or any(
        isinstance(a, ast.Name) and a.id == "world" for a in call.args
    )
