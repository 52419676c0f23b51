"""The Tab key: verbs, their options, sweeps, groups, choices and what follows a comma."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitsweep.cli.show import suggestions
from vitsweep.results.store import Store


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pl", ["plan"]),
        ("prec", ["precision.", "precision="]),
        ("sharding=z", ["sharding=zero1", "sharding=zero2"]),
        (
            "-m precision=O1,b",
            ["precision=O1,bf16", "precision=O1,bf16_masters", "precision=O1,bf16_params"],
        ),
        ("-m precision=bf16,b", ["precision=bf16,bf16_masters", "precision=bf16,bf16_params"]),
        ("-m precision=O1,O2 batch.im", ["batch.images_per_step="]),
        ("plan -m classifier=", ["classifier=pooled", "classifier=token"]),
        ("+sweep=one", ["+sweep=one_at_a_time"]),
        ("status --", ["--all", "--help", "--json", "--watch"]),
        ("compare --w", ["--width"]),
        ("retry first --set classifier=p", ["classifier=pooled"]),
        ("report fi", ["first"]),
        ("gate first --against sec", ["second"]),
        ("doctor --j", ["--json"]),
        ("'optimizer=glob(", []),
        ("sweep.zip=[[a,b", []),
    ],
)
def test_what_may_follow_is_suggested(
    line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        Store(tmp_path / "results" / name).create()
    assert suggestions(line) == found


def test_an_empty_line_may_begin_with_a_verb_or_a_group() -> None:
    assert {"plan", "doctor", "precision=", "sharding="} <= set(suggestions(""))


@pytest.mark.slow
def test_bash_completes_the_command(tmp_path: Path) -> None:
    command = tmp_path / "vitsweep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vitsweep "$@"\n')
    command.chmod(0o755)
    typed = "vitsweep plan -m sharding=ddp,f"
    script = (
        f'eval "$({command} -sc install=bash)"; complete -p vitsweep; '
        f"COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_CWORD=3; "
        'hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    asked = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.splitlines()[-1] == "sharding=ddp,fsdp"
    assert "hydra_bash_completion vitsweep" in asked.stdout
