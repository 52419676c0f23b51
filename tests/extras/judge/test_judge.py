"""`vitsweep judge` on repositories of others."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cells import TINY
from tests.extras.judge.project import MODEL, SETTINGS, STEP, TRAIN, commit, git, repository, write
from tests.refusals import require
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.judge import session
from vitsweep.extras.judge.verb_judge import judge_request, run

pytestmark = pytest.mark.usefixtures("forked_sides")


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


@pytest.mark.smoke
def test_a_slow_base_and_a_faster_working_tree(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitsweep.extras.judge.trial.LONGEST_WINDOW", 0.1)
    unpacked = "images, labels = batch"
    slow = "import time\n" + TRAIN.replace(unpacked, f"time.sleep(0.02)\n        {unpacked}")
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


def test_a_file_that_the_head_deleted_is_named(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(project, "rm", "--quiet", "--cached", "train.py")
    git(project, "commit", "--quiet", "--message", "No step")
    code, verdict = judged(capsys, "HEAD~1", "HEAD")
    assert (code, verdict["answer"]) == (ExitCode.ok, "same code")
    assert any("`train.py`" in note for note in verdict["notes"])


def test_a_folder_that_is_not_there_is_refused(project: Path) -> None:
    with pytest.raises(BadValueError, match="--path nothere"):
        run(["HEAD", "--step", STEP, "--path", "nothere", *SETTINGS])


def test_a_judge_that_runs_nothing_of_the_project_asks_for_the_step(project: Path) -> None:
    write(project, {"train.py": TRAIN + "# changed\n"})
    commit(project, "Changed")
    with pytest.raises(VitsweepError, match="No file of the project ran"):
        run(["HEAD~1", "HEAD", "--minutes", "0.3", *SETTINGS, *TINY])


def test_a_package_that_both_sides_import_from_one_checkout_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src").mkdir()
    git(project, "mv", "net", "src/net")
    commit(project, "Another layout")
    write(project, {"src/net/model.py": MODEL + "# changed\n"})
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))  # as an editable install has it
    with pytest.raises(VitsweepError, match="`--path src`"):
        judged(capsys, "HEAD")


def test_what_is_no_commit_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadValueError, match="`nowhere`"):
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


def test_a_function_that_a_file_does_not_name_is_refused_before_anything_runs(
    project: Path,
) -> None:
    with pytest.raises(BadValueError, match="`nofunc`"):
        run(["HEAD", "--step", "train.py:nofunc", *SETTINGS])
    write(project, {"train.py": TRAIN.replace("make_step", "another")})
    with pytest.raises(BadValueError, match="`make_step`"):
        run(["HEAD", "--step", STEP, *SETTINGS])
    write(project, {"train.py": "raise SystemExit(1)\nfrom net import *\n"})
    assert run(["HEAD", "--step", "train.py:make_step", *SETTINGS]) == ExitCode.not_all_measured


def test_a_quality_that_the_step_has_not_is_refused_with_those_that_there_are(
    project: Path,
) -> None:
    write(
        project,
        {
            "train.py": TRAIN.replace(
                "    return step\n", "    step.accuracy = step\n    return step\n"
            )
        },
    )
    commit(project, "A measure")
    with pytest.raises(BadValueError, match=r"^`--quality los`") as said:
        run(["HEAD", "--step", STEP, "--quality", "los", "--minutes", "0.3", *SETTINGS])
    require(str(said.value), "`--quality los` `--quality loss` `--quality accuracy`")


def test_git_ignores_what_a_verdict_leaves(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, {"net/unused.py": "pass\n"})
    assert run(["HEAD", "--step", STEP, "--minutes", "0.3", *SETTINGS]) == ExitCode.ok
    assert git(project, "status", "--short").split() == ["??", "net/unused.py"]


def test_examples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["main", "--step", STEP, "data=synthetic", "batch.images_per_step=16"]
    cell, _, _ = session._frozen_cell(judge_request(words)[0])
    shapes = []
    for most in (2**30, 2**25):
        monkeypatch.setattr(session, "MOST_EXAMPLE_BYTES", most)
        session._write_examples(cell, tmp_path / "examples.pt")
        images, labels = torch.load(tmp_path / "examples.pt", weights_only=True)
        assert len(images) == len(labels)
        shapes.append(len(images))
    image_bytes = images[0].nbytes
    assert shapes == [9 * 16, max(2, int(2**25 / image_bytes) // 16) * 16]
