"""Disks that fail, and file systems that lack a call: a library makes the calls of the system fail."""

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import NO_REPORT, Command
from tests.other_process import finished, other_process

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

FAULTY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(const char *call, const char *path) {  /* FAULT="CALL PART_OF_PATH ERRNO" */
    char failing[16], part[64]; int number;
    const char *fault = getenv("FAULT");
    if (!fault || sscanf(fault, "%15s %63s %d", failing, part, &number) != 3) return 0;
    if (strcmp(call, failing) || !strstr(path, part)) return 0;
    errno = number;
    return 1;
}
static int fails_at(const char *call, int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(call, path);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int fsync(int descriptor) { return fails_at("fsync", descriptor) ? -1 : REAL(fsync)(descriptor); }
ssize_t read(int descriptor, void *to, size_t size) {
    return fails_at("read", descriptor) ? -1 : REAL(read)(descriptor, to, size);
}
int renameat(int from, const char *old, int to, const char *new) {
    return fails("rename", new) ? -1 : REAL(renameat)(from, old, to, new);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.c").write_text(FAULTY)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "faulty.so", folder / "faulty.c"]
    subprocess.run(command, check=True)
    return folder / "faulty.so"


CREATE = """
    import sys
    from pathlib import Path
    from vitsweep.errors import VitsweepError
    from vitsweep.results.store import Store
    try:
        Store(Path(sys.argv[1])).create()
    except VitsweepError as error:
        print(error)
"""


def test_what_records_need_is_tried_before_anything_is_measured(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(library))
    for call, number in (("rename", errno.ENOSYS), ("fsync", errno.EINVAL), ("fsync", errno.EIO)):
        monkeypatch.setenv("FAULT", f"{call} .probe {number}")
        told = finished(other_process(CREATE, tmp_path / "sweep"))
        assert f"`{tmp_path}/sweep` cannot be written ({os.strerror(number)})" in told
    monkeypatch.delenv("FAULT")
    assert not finished(other_process(CREATE, tmp_path / "sweep"))


def test_a_disk_that_fails_is_reported_in_a_sentence(library: Path, vitsweep: Command) -> None:
    asked = ("sweep.baseline=null", NO_REPORT)

    def told(fault: str, *words: str) -> str:
        running = vitsweep.start(*words, more={"LD_PRELOAD": str(library), "FAULT": fault})
        out, err = running.communicate(timeout=200)
        assert running.returncode == 2, out + err
        assert "Traceback" not in out + err
        assert "is kept" in err
        return err

    said = told(f"fsync /runs/ {errno.EIO}", *asked)
    assert "/runs/" in said
    assert f"({os.strerror(errno.EIO)})" in said
    assert not any(vitsweep.store.runs())
    assert vitsweep(*asked).returncode == 0
    [run] = vitsweep.store.runs()
    assert run.attempt == 1, "its draft was kept, and published"
    said = told(f"read commands.jsonl {errno.ESTALE}", *asked)
    assert re.search(rf"commands\.jsonl`.*\({os.strerror(errno.ESTALE)}\)", said)
