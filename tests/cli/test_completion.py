"""The Tab key: groups, choices and keys, as in any application of Hydra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completed(folder: Path, *lines: str) -> list[str]:
    """What bash offers for each line, by the script that Hydra writes."""
    command = folder / "vitsweep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vitsweep "$@"\n')
    command.chmod(0o755)
    asked = "".join(
        f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={line.count(' ')}; "
        'hydra_bash_completion; echo "${COMPREPLY[@]}"; '
        for line in lines
    )
    done = subprocess.run(
        ["bash", "-c", f'eval "$({command} -sc install=bash)"; complete -p vitsweep; {asked}'],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    first, *found = done.stdout.splitlines()
    assert "hydra_bash_completion vitsweep" in first
    return found


@pytest.mark.slow
def test_bash_completes_the_command(tmp_path: Path) -> None:
    found = completed(
        tmp_path,
        "vitsweep sharding=z",
        "vitsweep plan -m precision=O1,O2 batch.im",
        "vitsweep seed=[[a,b",
    )
    assert found == ["sharding=zero1 sharding=zero2", "batch.images_per_step=", ""]
