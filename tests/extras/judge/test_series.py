"""Many proposals, one after another: the level of each, the ledger, the base that moves."""

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.extras.judge.project import SETTINGS, STEP, TRAIN, commit, git, repository, write
from tests.extras.judge.test_error_rate import QUIETER, RECORDED, Silent
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.judge import series, trial
from vitsweep.extras.judge.series import any_look_e_value
from vitsweep.extras.judge.trees import BASE, HEAD, Tree
from vitsweep.extras.judge.verb_judge import judge_request, run
from vitsweep.extras.judge.verdict import Answer, Verdict
from vitsweep.tables.stats import any_look_half_width, any_look_p_value

pytestmark = pytest.mark.usefixtures("forked_sides")

NIGHTS, PROPOSALS, TRUE_ONES, MOST_BLOCKS = 500, 100, 10, 40
GAIN, WIDTH = math.log(1.1), 0.03


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """What earlier tests left, such as a loader's workers, would wait for a simulated clock."""
    gc.collect()


def test_the_levels_of_all_proposals_sum_to_5_percent_where_none_is_accepted() -> None:
    levels = series.level(np.arange(1, 10**6), 0)
    rest = 0.05 * (10**6) ** -0.1 / 0.1 / 10.584448  # of the sum beyond, by the integral
    assert levels.sum() + rest == pytest.approx(0.05, rel=1e-4)
    assert series.level(7, 3) == pytest.approx(4 * series.level(7, 0))


def test_the_e_value_is_the_reciprocal_of_the_p_value_above_0_and_shows_nothing_below() -> None:
    above = any_look_e_value(0.05, 0.02, 12)
    assert above == pytest.approx(1 / any_look_p_value(0.05, 0.02, 12))
    half = any_look_half_width(0.02, 12, 0.01)
    assert any_look_e_value(half, 0.02, 12) == pytest.approx(100)
    assert any_look_e_value(-0.05, 0.02, 12) < 1


def night(
    draw: NDArray[np.float64], gains: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Judge all proposals of all nights by the rule of `Proposal`; the rows are nights.

    Args:
        draw: noise of each block; (nights, proposals, blocks).
        gains: true log(head / base); (nights, proposals).

    Returns:
        Which were accepted, and how many blocks each took.
    """
    logs, least = draw + gains[..., None], trial.LEAST_BLOCKS
    most = logs.shape[-1]
    looks = [series.evidence(logs[..., :n]) for n in range(least, most + 1)]
    values, highs = (np.stack(each, axis=-1) for each in zip(*looks, strict=True))
    accepted = np.zeros(gains.shape, bool)
    blocks = np.zeros(gains.shape, int)
    rows = np.arange(len(gains))
    for place in range(gains.shape[1]):
        level = series.level(place + 1, accepted.sum(axis=1))
        shown = values[:, place] >= 1 / level[:, None]
        ends = shown | (highs[:, place] < math.log1p(WIDTH))
        first = np.where(ends.any(axis=1), ends.argmax(axis=1), most - least)
        again = np.minimum(first + least, most - least)
        fresh = np.array([logs[r, place, first[r] + least : again[r] + least].sum() for r in rows])
        is_first = shown[rows, first]
        is_whole = first + least <= most - least
        accepted[:, place] = is_first & is_whole & (fresh > 0) & shown[rows, again]
        blocks[:, place] = np.where(is_first, again, first) + least
    return accepted, blocks


def simulated(noise: str, nights: int) -> tuple[float, float, float]:
    """Return the mean share of false ones among the accepted, true ones found, and blocks, a night."""
    random = np.random.default_rng(1)
    shape = (nights, PROPOSALS, MOST_BLOCKS)
    if noise.startswith("recorded"):
        size = QUIETER if noise.endswith("quieter") else 1.0
        draw = size * random.choice([-1.0, 1.0], shape) * random.choice(RECORDED, shape)
    else:
        draw = float(noise) * random.standard_normal(shape)
    gains = np.zeros(shape[:2])
    for row in gains:
        row[random.choice(PROPOSALS, TRUE_ONES, replace=False)] = GAIN
    accepted, blocks = night(draw, gains)
    wrong = (accepted & (gains == 0)).sum(axis=1) / np.maximum(accepted.sum(axis=1), 1)
    found = (accepted & (gains > 0)).sum(axis=1)
    return float(wrong.mean()), float(found.mean()), float(blocks.sum(axis=1).mean())


def test_a_simulated_proposal_ends_as_the_real_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, random = [0.0], np.random.default_rng(2)
    monkeypatch.setattr(trial.time, "monotonic", lambda: clock[0])
    draw = 0.02 * random.standard_normal((40, 1, MOST_BLOCKS))
    gains = np.where(np.arange(40) % 2, GAIN, 0.0)[:, None]
    accepted, blocks = night(draw, gains)
    for row, logs in enumerate(draw[:, 0] + gains):
        verdict = proposal(logs.tolist(), clock)._judged()
        assert verdict.accepted == accepted[row, 0]
        assert verdict.speed is not None
        assert verdict.speed.num_blocks == blocks[row, 0]
    assert accepted[1::2].sum() >= 18
    assert not accepted[::2].any()


def proposal(logs: list[float], clock: list[float]) -> series.Proposal:
    trees = [Tree(side=s, root=Path(s), label=s, source=Path(s)) for s in (BASE, HEAD)]
    sides = [Silent(tree=t, python="", paths=(), folder=Path(), timeout=1.0) for t in trees]
    held = series.Proposal(
        base=sides[0],
        head=sides[1],
        request={"script": "", "quality": "none"},
        ranks=1,
        width=WIDTH,
        deadline=clock[0] + len(logs),
        folder=Path(),
        facts={},
        flops_per_second=0.0,
        say=lambda text: None,
        number=1,
        level=float(series.level(1, 0)),
    )
    left = iter(logs)

    def block(*_: object) -> float:
        clock[0] += 1.0
        return next(left)

    held.step_seconds[HEAD].append(1.0)
    held._probe = lambda: False  # type: ignore[method-assign]
    held._block = block  # type: ignore[method-assign]
    return held


def test_a_faster_head_counts_only_where_fresh_processes_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: clock[0])
    random = np.random.default_rng(3)
    first = 0.1 + 0.01 * random.standard_normal(MOST_BLOCKS)
    starts = next(
        n
        for n in range(5, 40)
        if any_look_e_value(first[:n].mean(), first[:n].std(ddof=1), n) >= 1 / series.level(1, 0)
    )
    verdict = proposal([*first[:starts], *(-0.01 * np.ones(5))], clock)._judged()
    assert (verdict.answer, verdict.accepted) == (Answer.undecided, False)
    assert verdict.exit_code == ExitCode.gate_undecided


@pytest.mark.parametrize("noise", ["0.02", "recorded"])
def test_of_some_nights_few_accepted_proposals_are_false(noise: str) -> None:
    assert simulated(noise, 20)[0] <= 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    ("noise", "least_found"),
    [("0.02", 9.9), ("0.05", 9.5), ("0.2", 0.0), ("recorded quieter", 9.9), ("recorded", 0.0)],
)
def test_of_500_nights_at_most_5_percent_of_the_accepted_are_false(
    noise: str, least_found: float
) -> None:
    wrong, found, blocks = simulated(noise, NIGHTS)
    print(f"{noise}: {100 * wrong:.2f} % false, {found:.2f} of 10 found, {blocks:.0f} blocks")
    assert wrong <= 0.05
    assert found >= least_found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = repository(tmp_path / "project")
    monkeypatch.chdir(root)
    return root


def slower(seconds: float) -> str:
    unpacked = "images, labels = batch"
    return "import time\n" + TRAIN.replace(unpacked, f"time.sleep({seconds})\n        {unpacked}")


def proposed(base: str, head: str, *more: str, minutes: float = 2) -> int:
    words = [
        base,
        head,
        "--step",
        STEP,
        "--series",
        "../night",
        "--minutes",
        str(minutes),
        *SETTINGS,
    ]
    return run([*words, *more])


def ledger(root: Path) -> list[dict]:
    text = (root.parent / "night" / "ledger.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_an_accepted_proposal_becomes_the_next_base(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitsweep.extras.judge.trial.LONGEST_WINDOW", 0.1)
    write(project, {"train.py": slower(0.02)})
    base = commit(project, "Slow")
    write(project, {"train.py": TRAIN})
    fast = commit(project, "Fast")
    git(project, "checkout", "--quiet", "--detach", base)
    git(project, "branch", "--force", "gone", fast)
    assert proposed(base, fast) == ExitCode.ok
    assert "Proposal 1 is accepted" in capsys.readouterr().out
    assert git(project, "rev-parse", "refs/vitsweep/night").strip() == fast
    assert proposed(base, fast) == ExitCode.gate_failed, "the same code as the new base"
    assert proposed(fast, base) == ExitCode.gate_failed
    begun, first, _, same, _, last = ledger(project)
    assert (begun["base"], begun["head"]) == (base, fast)
    assert (first["answer"], first["accepted"], first["proposal"]) == ("faster", True, 1)
    assert first["e_value"] >= 1 / first["level"]
    assert (same["answer"], same["accepted"]) == ("same code", False)
    assert (last["answer"], last["head"], last["proposal"]) == ("slower", base, 3)
    assert last["level"] == pytest.approx(float(series.level(3, 1)))
    with pytest.raises(BadValueError, match=r"was begun with cell_id .* begin another series"):
        proposed(fast, base, "batch.images_per_step=16")
    write(project, {"other.txt": ""})
    other = commit(project, "Of no series")
    with pytest.raises(BadValueError, match=r"compares with .*: type `refs/vitsweep/night`"):
        proposed(other, base)


def test_a_proposal_that_was_killed_counts_as_not_accepted(project: Path) -> None:
    head = commit(project, "A proposal")
    with series.opened(Path("../night"), print) as held:
        spent = held.level
        held.begin(*held.states(head, head), {})
    with series.opened(Path("../night"), print) as held:
        assert (held.number, held.accepted, held.base) == (2, [], head)
        assert held.level < spent


def test_a_torn_line_is_dropped_in_words_and_a_damaged_one_refused(project: Path) -> None:
    head = commit(project, "A proposal")
    path, said = project.parent / "night" / "ledger.jsonl", list[str]()
    with series.opened(path.parent, said.append) as held:
        held.begin(*held.states(head, head), {})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    with series.opened(path.parent, said.append) as held:
        assert held.number == 2
    assert said == [f"The last line of `{path}` was cut in half by a crash; it is dropped."]
    assert path.read_bytes() == whole
    for damaged in (b"{}\n" + whole, whole + whole, b"\xff\n" + whole):
        path.write_bytes(damaged)
        with (
            pytest.raises(VitsweepError, match="is damaged"),
            series.opened(path.parent, said.append),
        ):
            pass


def test_two_commands_of_one_series_at_once_are_refused(project: Path) -> None:
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    folder = project.parent / "night"
    folder.mkdir()
    command = [sys.executable, "-c", holder, str(folder / "ledger.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(VitsweepError, match="another command measures"):
            proposed("HEAD", "HEAD")
        other.communicate()


def test_a_ledger_that_a_candidate_changed_is_written_anew(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD").strip()
    facts = {"series": {"proposal": 1, "accepted": True}}
    found = Verdict(answer=Answer.faster, base="b", head="h", facts=facts, accepted=True)
    with series.opened(Path("night"), print) as held:
        held.begin(head, head, {})
        forged = held.path.read_text(encoding="utf-8").replace("begin", "end")
        held.path.write_text(forged, encoding="utf-8")
        ended = held.end(found, Path("records"))
    assert (ended.answer, ended.accepted) == (Answer.wrong, False)
    with series.opened(Path("night"), print) as held:
        assert [entry["event"] for entry in held.entries] == ["begin", "end"]
        assert (held.accepted, held.number) == ([], 2)


def test_a_ref_of_another_series_is_not_overwritten(project: Path) -> None:
    git(project, "update-ref", "refs/vitsweep/night", "HEAD")
    head = commit(project, "A proposal")
    with series.opened(Path("../night"), print) as held:
        with pytest.raises(BadValueError, match="of another series"):
            held.begin(*held.states(head, head), {})
        assert held.entries == []


def test_what_no_series_takes_is_refused(project: Path) -> None:
    with pytest.raises(BadValueError, match="a working tree cannot become the next base"):
        run(["HEAD", "--step", STEP, "--series", "../night", *SETTINGS])
    with pytest.raises(BadValueError, match=r"no `--script` and no `--quality`"):
        judge_request(["main", "topic", "--step", "a.py:f", "--quality", "loss", "--series", "x"])
    with (
        pytest.raises(BadValueError, match="which git refuses"),
        series.opened(Path("../a~b"), print),
    ):
        pass
