"""What a candidate may do in its own process, and what the judge says of it."""

import importlib.util
import marshal
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.extras.judge import cheats
from tests.extras.judge.project import MODEL, TRAIN, write
from tests.refusals import named
from vitsweep.extras.judge.sides import (
    Bounds,
    RunFailedError,
    Side,
    Training,
    WrongEvidenceError,
    own_modules,
)
from vitsweep.extras.judge.trees import Tree
from vitsweep.extras.judge.trial import ENOUGH_EXPLAINED, Seeds, Trial
from vitsweep.extras.judge.verdict import Answer

CELL = {
    "path": "",
    "images_per_step": 16,
    "in_channels": 1,
    "resolution_px": 8,
    "num_classes": 10,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """An honest base, and a head that holds every cheat; one fork server each for all tests."""
    import sys

    folder = tmp_path_factory.mktemp("sides")
    found = []
    for name in ("base", "head"):
        root = folder / name
        honest = "".join(
            f"\n\n{each} = make_step\n" for each in [*cheats.FOUND, *cheats.EQUAL] if name == "base"
        )
        code = TRAIN + honest if name == "base" else cheats.HEAD
        files = {"net/__init__.py": "", "net/model.py": MODEL, "train.py": code}
        write(root, files | {"settings.json": "{}", "configurator.py": "width = 64\n"})
        tree = Tree(side=name, root=root, label=name, source=root)
        paths = [str(root.resolve())]
        found.append(
            Side(tree=tree, python=sys.executable, paths=paths, folder=folder, timeout=500.0)
        )
    yield found[0], found[1]
    for side in found:
        side.close()


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "examples.pt"
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(144, 1, 8, 8, generator=generator)
    torch.save((images, torch.randint(10, (144,), generator=generator)), path)
    return path


@pytest.fixture(scope="module")
def base(
    sides: tuple[Side, Side], examples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Seeds, Training, Bounds]:
    """The seeds of a proof, the base's training from them, and what rounding explains of another one."""
    return trial(sides, examples, "honest", tmp_path_factory.mktemp("base"))._seeds_of_proof()


def test_seeds_with_which_rounding_hides_a_fault_are_drawn_again(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these three the bounds were twice an update, so that cheats passed."""
    held = trial(sides, examples, "honest", tmp_path)
    drawn = iter([840130225, 2038359293, 1667693793])
    monkeypatch.setattr("vitsweep.extras.judge.trial.secrets.randbits", lambda bits: next(drawn, 5))
    seeds, _, bounds = held._seeds_of_proof()
    assert seeds == Seeds(first=5, warm_up=5, window=5)
    assert bounds.of_updates <= ENOUGH_EXPLAINED


def trial(sides: tuple[Side, Side], examples: Path, name: str, folder: Path) -> Trial:
    return Trial(
        base=sides[0],
        head=sides[1],
        request={
            "cell": CELL,
            "threads": 1,
            "examples": str(examples),
            "quality": "",
            "script": "",
            "step": ["train.py", name],
        },
        ranks=1,
        width=10.0,
        deadline=time.monotonic() + 5,
        folder=folder,
        facts={},
        flops_per_second=0.0,
        say=lambda text: None,
        steps=8,
        base_files=("settings.json",),
    )


def train_head(held: Trial, base: tuple[Seeds, Training, Bounds]) -> None:
    seeds, wanted, bounds = base
    bounds.require_equal(held._training(held._run(held.head, "proof", seeds), held.head), wanted)


@pytest.fixture
def trial_of(sides: tuple[Side, Side], examples: Path, tmp_path: Path) -> Callable[[str], Trial]:
    """Name of the head's `make_step` -> its trial."""
    return lambda name: trial(sides, examples, name, tmp_path)


@pytest.mark.parametrize("name", cheats.FOUND)
def test_a_cheat_is_found(
    name: str, trial_of: Callable[[str], Trial], base: tuple[Seeds, Training, Bounds]
) -> None:
    held = trial_of(name)
    if name.endswith("between_runs"):
        held._run(held.head, "proof", Seeds())
    with pytest.raises((WrongEvidenceError, RunFailedError), match=cheats.FOUND[name]):
        train_head(held, base)


@pytest.mark.parametrize("name", cheats.EQUAL)
def test_equal_training_is_proved(
    name: str, trial_of: Callable[[str], Trial], base: tuple[Seeds, Training, Bounds]
) -> None:
    train_head(trial_of(name), base)


def test_processes_that_a_run_leaves_behind_are_killed(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path
) -> None:
    held = trial(sides, examples, "process_left_running", tmp_path)
    held._run(held.head, "proof", Seeds())
    [note] = held.notes
    assert named(note) == {"1"}


def test_a_time_that_the_counted_work_does_not_allow_is_wrong(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path
) -> None:
    held = trial(sides, examples, "honest", tmp_path)
    held.found["flops_per_step"] = {"base": 1e12, "head": 1e12}
    held.step_seconds = {"base": [1.0, 0.4], "head": [0.1]}
    held.cpus = {"base": [1.0], "head": [1.2]}
    held.flops_per_second = 20e12
    held._require_possible()
    held.flops_per_second = 1e12
    with pytest.raises(WrongEvidenceError, match="TFLOP/s"):
        held._require_possible()
    held.step_seconds["base"].append(0.15)  # the rate was measured while the machine was busy
    held._require_possible()
    held.cpus["head"] = [1.9]
    with pytest.raises(WrongEvidenceError, match=r"1\.9 .* 1\.0\b"):
        held._require_possible()


def test_a_source_file_that_is_read_counts_as_one_that_is_imported(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path
) -> None:
    held = trial(sides, examples, "reads_a_source_file", tmp_path)
    held.steps = 400
    result = held._run(held.head, "proof", Seeds())
    assert "configurator.py" in own_modules(*reversed(sides), result.evidence["modules"])
    assert result.cpu_seconds > 0


def test_bytecode_that_its_source_does_not_give_is_not_run(
    sides: tuple[Side, Side],
    examples: Path,
    base: tuple[Seeds, Training, Bounds],
    tmp_path: Path,
) -> None:
    seeds, wanted, bounds = base
    source = sides[0].tree.root / "net" / "model.py"
    code = compile(MODEL.replace("x + torch.relu", "x - torch.relu"), str(source), "exec")
    is_now = source.stat()
    header = importlib.util.MAGIC_NUMBER + struct.pack(
        "<III", 0, int(is_now.st_mtime), is_now.st_size
    )
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(header + marshal.dumps(code))
    held = trial(sides, examples, "honest", tmp_path)
    bounds.require_equal(held._training(held._run(sides[0], "proof", seeds), sides[0]), wanted)
    shutil.rmtree(cached.parent)


def test_a_head_that_edits_the_base_or_takes_more_threads_is_wrong(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path
) -> None:
    held = trial(sides, examples, "honest", tmp_path)
    probe = {side.tree.side: held._run(side, "probe", Seeds(), count=True) for side in sides}
    both = {"base": sides[1], "head": sides[0]}
    held.found["files"] = {
        side.tree.side: own_modules(
            side, both[side.tree.side], probe[side.tree.side].evidence["modules"]
        )
        for side in sides
    }
    held._require_same_setup(probe)
    file = sides[0].tree.root / "net" / "model.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text + "import time\ntime.sleep(0.01)\n", encoding="utf-8")
    edited = probe | {"base": held._run(sides[0], "block", Seeds())}
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongEvidenceError, match=r"`net/model.py`"):
        held._require_same_setup(edited)
    more = replace(probe["head"], evidence=probe["head"].evidence | {"threads": 4})
    with pytest.raises(WrongEvidenceError, match=r"4 .* 1: .*`resources\.threads_per_rank=4`"):
        held._require_same_setup(probe | {"head": more})


def test_records_that_a_candidate_changed_are_written_anew(
    sides: tuple[Side, Side], examples: Path, tmp_path: Path
) -> None:
    held = trial(sides, examples, "honest", tmp_path)
    held._run(held.head, "probe", Seeds())
    file = tmp_path / "runs.jsonl"
    true = file.read_text(encoding="utf-8")
    assert not held._verdict(Answer.wrong).notes
    file.write_text(true.replace("head", "base"), encoding="utf-8")
    notes = held._verdict(Answer.wrong).notes
    assert file.read_text(encoding="utf-8") == true
    assert [named(note) for note in notes] == [{"`runs.jsonl`"}]


def test_losses_that_are_not_finite_are_never_equal() -> None:
    weights = {"w": torch.zeros(2)}
    nan = Training(losses=[[float("nan")]], start=weights, end=weights)
    zero = Training(losses=[[0.0]], start=weights, end=weights)
    bounds = Bounds.between(zero, zero)
    bounds.require_equal(zero, zero)
    with pytest.raises(WrongEvidenceError):
        bounds.require_equal(zero, nan)
    with pytest.raises(WrongEvidenceError):
        bounds.require_equal(nan, zero)
