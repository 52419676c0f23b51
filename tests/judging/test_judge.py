"""`vitsweep judge` on repositories of others."""

import json
import os
from pathlib import Path

import pytest

from tests.judging.project import MODEL, SETTINGS, STEP, TRAIN, commit, git, repository, write
from vitsweep.cli.judge import judge_request, run
from vitsweep.errors import BadValueError, ExitCode, VitsweepError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = repository(tmp_path / "project")
    monkeypatch.chdir(root)
    return root


def judged(
    capsys: pytest.CaptureFixture[str], *words: str, minutes: float = 0.3
) -> tuple[int, dict]:
    code = run([*words, "--step", STEP, "--minutes", str(minutes), "--json", *SETTINGS])
    return code, json.loads(capsys.readouterr().out)


def test_a_slow_base_and_a_faster_working_tree(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitsweep.judging.trial.LONGEST_WINDOW", 0.1)
    unpacked = "images, labels = batch"
    slow = "import time\n" + TRAIN.replace(unpacked, f"time.sleep(0.05)\n        {unpacked}")
    write(project, {"train.py": slow})
    base = commit(project, "Slow")
    write(project, {"train.py": TRAIN})
    comment = tmp_path / "comment.md"
    code, verdict = judged(capsys, base, "--markdown", str(comment), minutes=3)
    assert (code, verdict["answer"]) == (ExitCode.ok, "faster")
    assert verdict["speed"]["low"] > 1
    assert verdict["changed_files"] == ["train.py"]
    assert verdict["equality"].startswith("Equal in losses of")
    assert comment.read_text(encoding="utf-8").startswith("**faster**")
    assert "worktrees" not in git(project, "worktree", "list")
    assert len(git(project, "worktree", "list").splitlines()) == 1
    [folder] = (project / "results" / "judge" / "judged").iterdir()
    records = [
        json.loads(line)
        for line in (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {record["side"] for record in records} == {"base", "head"}
    assert not (folder / "code" / "base").exists()


def test_identical_modules_are_the_same_code(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = {"other.py": "pass\n", "results/first/runs.jsonl": "of another command"}
    write(project, {**earlier, "net/unused.py": "pass\n"})
    git(project, "add", "net/unused.py")  # so that there is something to stash
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # as on a runner of CI
    code, verdict = judged(capsys, "HEAD")
    assert (code, verdict["answer"]) == (ExitCode.ok, "same code")
    assert verdict["changed_files"] == ["net/unused.py", "other.py"]


def test_a_package_that_both_sides_import_from_one_checkout_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src").mkdir()
    git(project, "mv", "net", "src/net")
    commit(project, "Another layout")
    write(project, {"src/net/model.py": MODEL + "# changed\n"})
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))  # as an editable install has it
    with pytest.raises(VitsweepError, match=r"outside of its tree.*`--path src`"):
        judged(capsys, "HEAD")


def test_what_is_no_commit_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadValueError, match="`nowhere` is no commit"):
        judged(capsys, "nowhere")


def test_techniques_that_need_the_inside_of_a_model_are_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VitsweepError, match="attention=linear"):
        judged(capsys, "HEAD", "attention=linear")


def test_the_line_is_read() -> None:
    request, as_json, _ = judge_request(
        ["main", "x=1", "topic", "--step", "a/b.py:f", "--minutes", "2"]
    )
    assert (request.base, request.head, request.overrides) == ("main", "topic", ("x=1",))
    assert (request.step, request.minutes, as_json) == (("a/b.py", "f"), 2.0, False)
    with pytest.raises(BadValueError, match=r"file\.py:function"):
        judge_request(["main", "--step", "a.py"])
