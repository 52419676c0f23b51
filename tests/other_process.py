"""Code that runs in another Python process, which may be killed or limited."""

import subprocess
import sys
import textwrap


def other_process(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: "subprocess.Popen[str]") -> str:
    answer, _ = process.communicate(timeout=500)
    assert process.returncode == 0
    return answer.strip()
