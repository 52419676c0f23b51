"""The workflows and the composite action that judge pull requests, and the script of the project's own CI."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extras.judge.project import SETTINGS, STEP, commit, git, repository, write

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
ACTION = "judge/.github/actions/judge"


def read(path: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((GITHUB / path).read_text(encoding="utf-8")))


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    jobs = workflow["jobs"].values() if "jobs" in workflow else [workflow["runs"]]
    return [step for job in jobs for step in job["steps"]]


def test_code_of_a_fork_runs_without_a_token_and_the_token_runs_no_code() -> None:
    measuring, commenting = read("workflows/judge.yml"), read("workflows/judge_comment.yml")
    assert list(measuring[True]) == ["pull_request"], "YAML 1.1 reads the key `on` as true"
    assert measuring["permissions"] == {}
    assert "secrets" not in str(measuring) + str(commenting) + str(read("actions/judge/action.yml"))
    checkouts = [s for s in steps(measuring) if s.get("uses", "").startswith("actions/checkout")]
    assert [c["with"]["persist-credentials"] for c in checkouts] == [False, False]
    assert [c["with"].get("ref") for c in checkouts][1].endswith("pull_request.base.sha }}")
    [judge] = [step for step in steps(measuring) if step.get("uses") == f"./{ACTION}"]
    assert checkouts[1]["with"]["path"] == "judge", "the target branch's copy judges"
    assert set(judge["with"]) <= set(read("actions/judge/action.yml")["inputs"])
    assert commenting[True]["workflow_run"]["workflows"] == [measuring["name"]]
    assert not [step for step in steps(commenting) if "uses" in step]


@pytest.mark.parametrize(
    "path", ["workflows/judge.yml", "workflows/judge_comment.yml", "actions/judge/action.yml"]
)
def test_no_text_of_a_pull_request_is_pasted_into_a_script(path: str) -> None:
    scripts = [step["run"] for step in steps(read(path)) if "run" in step]
    assert not [script for script in scripts if "${{" in script]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """The variables of a step, with an installed judge."""
    project = repository(tmp_path / "project")
    write(project, {"net/unused.py": "pass\n"})
    commit(project, "A file that nothing imports")
    python = tmp_path / "temp" / "judge" / "bin" / "vitsweep"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m vitsweep "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return {
        **os.environ,
        "RUNNER_TEMP": str(tmp_path / "temp"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "BASE": "HEAD^1",
        "HEAD": "HEAD",
        "ARGUMENTS": f"--step {STEP} --setup 'true && true' --minutes 0.3 {' '.join(SETTINGS)}",
        "PROJECT": "project",
        "FOLDER": "judged",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def run_action(folder: Path, runner: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = steps(read("actions/judge/action.yml"))[1]["run"]
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=runner, capture_output=True, text=True)


def test_the_action_keeps_verdict_and_records(tmp_path: Path, runner: dict[str, str]) -> None:
    done = run_action(tmp_path, runner)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "output").read_text() == "exit-code=0\n"
    assert (tmp_path / "summary.md").read_text().startswith("**same code**")
    assert (tmp_path / "judged" / "verdict.md").is_file()
    [records] = (tmp_path / "judged").rglob("runs.jsonl")
    assert (records.parent / "verdict.json").is_file()
    assert git(tmp_path / "project", "status", "--short") == ""


def test_the_action_fails_with_the_command(tmp_path: Path, runner: dict[str, str]) -> None:
    done = run_action(tmp_path, {**runner, "ARGUMENTS": "--step train.py:nofunc; touch pasted"})
    assert done.returncode
    assert (tmp_path / "output").read_text() == "exit-code=2\n"
    assert not list(tmp_path.rglob("pasted"))


def test_a_verdict_that_the_checkout_holds_is_never_shown(
    tmp_path: Path, runner: dict[str, str]
) -> None:
    write(tmp_path, {"judged/verdict.md": "**faster**"})
    assert run_action(tmp_path, runner).returncode == 2
    assert not (tmp_path / "summary.md").exists()


def test_the_action_reads_its_arguments_as_a_shell_would_or_fails(
    tmp_path: Path, runner: dict[str, str]
) -> None:
    done = run_action(tmp_path, {**runner, "ARGUMENTS": "--step 'train.py:make_step"})
    assert done.returncode
    assert "No closing quotation" in done.stderr


def test_what_a_candidate_prints_is_no_command_and_no_heading(
    tmp_path: Path, runner: dict[str, str]
) -> None:
    hostile = "raise RuntimeError('<!-- |\\n::error::forged\\n## faster 3x\\n```')\n"
    write(tmp_path / "project", {"train.py": hostile + "def make_step(cell): pass\n"})
    commit(tmp_path / "project", "Hostile")
    done = run_action(tmp_path, runner)
    assert (tmp_path / "output").read_text() == "exit-code=3\n"
    before, _, rest = done.stdout.partition("::stop-commands::")
    token = rest.partition("\n")[0]
    assert "forged" not in before
    assert "forged" not in rest.partition(f"::{token}::")[2]
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("**not measured**")
    assert "<!--" not in summary
    assert not [line for line in summary.splitlines() if line.startswith(("#", "`", ":"))]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This project at its working tree, in a repository of its own."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in ("vitsweep", "conf", ".ci", ".github"):
        subprocess.run(["cp", "-r", ROOT / name, root], check=True)
    (root / ".venv").symlink_to(sys.prefix)
    write(root, {".gitignore": "__pycache__/\n.venv\n"})
    git(root, "init", "--quiet")
    commit(root, "All")
    return root


def run_ci(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / ".ci" / "judge"], capture_output=True, text=True)


def test_ci_judges_only_what_measures(clone: Path) -> None:
    done = run_ci(clone)
    assert (done.returncode, "no HEAD^1" in done.stdout) == (0, True), done.stderr
    write(clone, {"vitsweep/tables/new.py": "pass\n"})
    commit(clone, "A table")
    done = run_ci(clone)
    assert (done.returncode, "no code that measures" in done.stdout) == (0, True), done.stderr


@pytest.mark.full
def test_ci_fails_where_the_step_trains_differently_and_nobody_says_why(clone: Path) -> None:
    trainer = clone / "vitsweep" / "training" / "trainer.py"
    text = trainer.read_text(encoding="utf-8")
    changed = text.replace(
        "scale(loss).backward()", "loss = loss * 1.01\n        scale(loss).backward()"
    )
    assert changed != text
    trainer.write_text(changed, encoding="utf-8")
    commit(clone, "Faster, they say")
    done = run_ci(clone)
    assert done.returncode == 1, done.stdout + done.stderr
    assert ": wrong." in done.stdout
    git(clone, "commit", "--quiet", "--amend", "--message", "A\n\nTrains differently: a test\n")
    done = run_ci(clone)
    assert (done.returncode, "says so itself" in done.stdout) == (0, True), done.stderr
