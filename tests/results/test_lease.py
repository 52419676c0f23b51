"""Two commands at one sweep, on a file system without locks and links: a library makes it and names nodes."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.other_process import finished, other_process
from vitsweep.results.store import Store

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

NO_FLOCK = """
#include <errno.h>
#include <stdlib.h>
#include <string.h>
int flock(int descriptor, int operation) { errno = ENOTSUP; return -1; }
int link(const char *from, const char *to) { errno = ENOSYS; return -1; }
int linkat(int a, const char *from, int b, const char *to, int flags) { errno = ENOSYS; return -1; }
int gethostname(char *name, size_t size) { strncpy(name, getenv("NODE"), size); return 0; }
"""
BEGIN = """
    import os, sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from vitsweep.results import lease
    from vitsweep.results.record import RunRecord, Status
    from vitsweep.results.store import Store
    lease.SECONDS_OF_LEASE = float(os.environ["LEASE"])
    clock = dict(monotonic=time.monotonic, time=time.time)
    lease.time = SimpleNamespace(**clock, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    store = Store(Path(sys.argv[1]))
"""
HOLDER = f"""
{BEGIN}
    with store.lock(on_wait=lambda: print("waits", flush=True)):
        print("held", flush=True)
        while word := sys.stdin.readline().strip():
            try:
                place = dict(run_id=word, sweep="s", cell_id="aa", block=word, position=0, attempt=1)
                store.publish(RunRecord(**place, status=Status.failed, spec={{}}))
                print("published", flush=True)
            except lease.LeaseLostError as error:
                print(error, flush=True)
"""
COUNTER = f"""
{BEGIN}
    for _ in range(5):
        with store.lock():
            count = store.root / "count"
            count.write_text(str(int(count.read_text()) + 1))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("no_flock")
    (folder / "flock.c").write_text(NO_FLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "flock.so", folder / "flock.c"]
    subprocess.run(command, check=True)
    return folder / "flock.so"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep").create()


@pytest.fixture
def start(library: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a process on a node, which holds the sweep or waits for it.

    It takes over from one that is silent for `lease` seconds: on a slow machine a living one may be.
    """

    def start_on(node: str, code: str = HOLDER, lease: float = 600.0) -> "subprocess.Popen[str]":
        with monkeypatch.context() as environment:
            environment.setenv("LD_PRELOAD", str(library))
            environment.setenv("NODE", node)
            environment.setenv("LEASE", str(lease))
            return other_process(code, store.root)

    return start_on


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def test_a_second_login_node_waits_until_the_first_gives_the_sweep_back(start: Start) -> None:
    first = start("one")
    assert line(first) == "held"
    second = start("two")
    assert line(second) == "waits"
    tell(first, "b0")
    assert line(first) == "published"
    tell(first, "")
    finished(first)
    assert line(second) == "held"
    second.kill()
    second.communicate()
    third = start("two", lease=0.5)
    assert (line(third), line(third)) == ("waits", "held"), "its owner is silent"
    tell(third, "")
    finished(third)


def test_a_command_that_slept_while_another_took_over_publishes_nothing(
    start: Start, store: Store
) -> None:
    first = start("one")
    assert line(first) == "held"
    os.kill(first.pid, signal.SIGSTOP)
    second = start("two", lease=0.5)
    assert (line(second), line(second)) == ("waits", "held")
    os.kill(first.pid, signal.SIGCONT)
    tell(first, "late")
    assert "has taken over" in line(first)
    tell(second, "b0")
    assert line(second) == "published"
    assert [run.block for run in store.runs()] == ["b0"]
    for process in (first, second):
        tell(process, "")
        finished(process)
    third = start("one")
    assert line(third) == "held", "the one that lost it took nothing away"
    tell(third, "")
    finished(third)


def test_of_many_nodes_one_at_a_time_holds_the_sweep(start: Start, store: Store) -> None:
    (store.root / "count").write_text("0")
    for process in [start(f"node{number % 2}", COUNTER) for number in range(4)]:
        finished(process)
    assert (store.root / "count").read_text() == "20"
    assert len(list(store.root.glob(".lock.lease.*"))) <= 3
