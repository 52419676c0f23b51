"""Cells that somebody else froze: what a command takes of them, and what it asks `--trust` for."""

import pwd
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.cli.retry import retries
from vitsweep.composition.frozen import words_of
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import read_cell
from vitsweep.launchers.slurm.submit.settings import Site, SlurmSettings
from vitsweep.planning.freeze import freeze
from vitsweep.planning.sweep_plan import SweepPlan, plan_cell, plan_of
from vitsweep.report.html import render
from vitsweep.results import provenance
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.from_yaml import hints_of
from vitsweep.tables.sweep_tables import SweepTables

COMPOSER = composer()
HOSTILE = "/tmp/evil.so"
CODE: dict[str, Any] = {"git_commit": None, "packages": {}}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sweep of two failed cells, which somebody else made."""
    monkeypatch.setattr(provenance, "_trusted", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    store = Store(tmp_path / "sweep").create()
    frozen(store, "precision=fp32,O1", "seed=3", "sweep.baseline=null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    return Store(store.root)


def frozen(
    store: Store, *words: str, command: str = "python -m vitsweep", **facts: Any
) -> SweepPlan:
    cells = expand([*TINY, *words], COMPOSER)
    plan = plan_of(cells, LAPTOP, COMPOSER)
    freeze(store, plan, sweep_settings(cells[0].tree), CODE, command=command, **facts)
    for cell_id in plan.entries:
        store.save_run(run(cell_id, "b0", 100, status=Status.failed))
    return plan


def changed(store: Store, cell_id: str, overrides: list[str] | None = None, **changes: Any) -> None:
    """Let somebody else change `group__key` of a cell, or what was typed for it."""
    path = store.cell(cell_id) / "cell.yaml"
    document = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        group, _, name = key.partition("__")
        document["cell"][group][name] = value
    document["overrides"] = overrides or document["overrides"]
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def retried(store: Store, *more: str) -> list[list[str]]:
    return retries([str(store.root), *more])


def ids_of(lines: list[list[str]]) -> set[str]:
    own = [[text for text in overrides if not text.startswith("hydra")] for _, *overrides in lines]
    return {c for words in own for c in plan_of(expand(words, COMPOSER), LAPTOP, COMPOSER).entries}


EXPLOITS = (
    "model=../../../team/code/m",
    "model=transformers",
    "model.name=/folder",
    "++model.arguments.trust_remote_code=true",
    "task.held_out=evil.f",
    "model.twin_batch=evil.f",
    "precision@model=../..",
    "sweep.baseline={model: ../..}",
    "hydra.launcher.export=[AWS_SECRET_ACCESS_KEY]",
    "hydra.searchpath=[file:///evil]",
    "tracker=wandb",
    "tracker.project=evil",
    "+x=${oc.env:HOME}",
    "++metric.columns.a={function: evil.f, unit: J, label: A, better: null}",
    "~seed",
    "--config-dir=/evil",
)


def test_what_somebody_else_typed_is_never_composed(theirs: Store) -> None:
    cells = theirs.cell_ids()
    for cell_id in cells:
        changed(theirs, cell_id, overrides=[*EXPLOITS])
    lines = retried(theirs)
    assert ids_of(lines) == {*cells}
    for exploit in EXPLOITS:
        assert exploit.partition("=")[2] not in " ".join(map(str, lines)) or exploit == "~seed"


CELLS = (
    "resources.ranks_per_node=2 sharding=zero1 precision=O2 precision.loss_scale=64",
    "model=video_vit_nano data=synthetic_video sequence_parallel=ulysses seed=5 mesh.ulysses=2",
    "task=train task.epochs=2 recipe=digits runtime=gc_scheduled measurement=smoke",
    "model=timm model.name=vit_tiny_patch16_224 compilation=compile_blocks",
    "model=module model.target=a.b '++model.arguments={a: [1, x y], b: {c: null}}' model.output=0 "
    """data=module data.target=a.c "++data.arguments={folder: \\"/it's here\\"}" data.num_workers=0""",
)


@pytest.mark.parametrize("line", CELLS)
def test_the_words_for_a_frozen_cell_make_the_same_cell(line: str) -> None:
    entry = plan_cell(COMPOSER.compose(shlex.split(line)), LAPTOP)
    again = words_of({name: entry.tree[name] for name in vars(entry.spec)})
    assert plan_cell(COMPOSER.compose(again), LAPTOP).spec == entry.spec
    assert len(again) < 25, "what is the menu's own, or follows, is not written"


def test_what_a_machine_chose_is_written_where_the_cell_is_wanted_exactly() -> None:
    entry = plan_cell(COMPOSER.compose(["seed=3", "precision=O1", "optimizer.eps=0.5"]), LAPTOP)
    tree = {name: entry.tree[name] for name in vars(entry.spec)}
    own = ["precision=O1", "seed=3"]
    degrees = ("pipeline", "shard", "sequence", "ring", "ulysses", "tensor")
    of_machine = [
        "resources.ranks_per_node=2",
        "resources.device=cpu",
        "resources.threads_per_rank=1",
    ]
    of_machine += [f"mesh.{degree}=1" for degree in degrees]
    assert {*words_of(tree)} == {*own, *of_machine, "optimizer.eps=0.5"}
    assert words_of(tree, exactly=False) == [*own, "optimizer.eps=0.5"]


def test_a_class_that_is_not_on_the_menu_is_taken_with_trust(
    theirs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of one's own conf folder, where the key was lost."""
    cell_id, other = theirs.cell_ids()
    target = "tests.user_techniques.Mumbles"
    changed(theirs, cell_id, memory___target_=target, memory__name="own")
    changed(theirs, other, memory___target_=target, memory__name="own")
    with pytest.raises(VitsweepError, match=f"memory._target_={target}[^$]*memory.name=own"):
        retried(theirs)
    monkeypatch.setattr(provenance, "_trusted", True)
    plan = plan_of(expand(retried(theirs)[0][1:], COMPOSER), LAPTOP, COMPOSER)
    found = {(type(e.spec.memory).__name__, e.spec.memory.name) for e in plan.entries.values()}
    assert found == {("Mumbles", "own")}


def test_all_text_is_named_at_once_and_asked_for_once(
    theirs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = theirs.cell_ids()
    changed(theirs, first, task__resume_from="/secret", precision__name="\x1b[2J")
    changed(theirs, second, loader__unknown=["x" * 5000, HOSTILE])
    changed(theirs, second, **{f"loader__k{number}": "/tmp" for number in range(1500)})
    node = {"function": "evil.f", "unit": "J", "label": "A", "better": None}
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs.root.parent / "theirs"))
    theirs.append_command({"command": "x", "cells": [], "metrics": {"a": node}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs.root.parent / "mine"))
    with pytest.raises(VitsweepError) as refused:
        retried(theirs)
    for text in (
        "task.resume_from=/secret", "precision.name=?[2J", "loader.k1499=/tmp",
        f"loader.unknown=['{'x' * 5000}', '{HOSTILE}']", "metric.columns.a.function=evil.f",
    ):  # fmt: skip
        assert f"- {text}\n" in str(refused.value)
    with pytest.raises(VitsweepError, match=r"task\.resume_from=/secret"):
        read_cell(theirs, first)

    with pytest.raises(VitsweepError, match=r"evil\.f"):
        frozen(theirs, "seed=4")
    with provenance.trusting(True):
        frozen(theirs, "seed=4", "task.resume_from=/mine", "task=train")
    assert theirs.metrics == {"a": node}
    [own] = {*theirs.cell_ids()} - {first, second}
    assert Store(theirs.root).is_own_cell(own)
    frozen(theirs, "seed=5")
    assert [*Store(theirs.root).commands()[-1]["cells"]]
    assert theirs.metrics == {"a": node}, "asked once"


def test_what_was_trusted_is_frozen_with_the_mark_of_who_trusted_it(theirs: Store) -> None:
    for cell_id in theirs.cell_ids():
        changed(theirs, cell_id, [*EXPLOITS], task__held_out="tests.user_modules.confidences")
    with pytest.raises(VitsweepError, match="held_out"):
        retried(theirs)
    with provenance.trusting(True):
        cells = expand(retried(theirs)[0][1:], COMPOSER)
    plan = plan_of(cells, LAPTOP, COMPOSER)
    assert {*plan.entries} == {*theirs.cell_ids()}
    freeze(theirs, plan, sweep_settings(cells[0].tree), CODE)
    again = retried(Store(theirs.root))
    assert "task.held_out=tests.user_modules.confidences" in str(again), "asked once"
    assert not any(exploit in str(again) for exploit in EXPLOITS)


def settings(*classes: Any) -> set[str]:
    return {name for cls in classes for name in hints_of(cls)}


def test_no_setting_of_a_launcher_is_taken_from_somebody_else(theirs: Store) -> None:
    """One line for each setting, Hydra's flags among them."""
    keys = [f"hydra.launcher.{key}" for key in settings(SlurmSettings)]
    keys += [f"hydra.launcher.site.{key}" for key in settings(Site)]
    keys += [f"sweep.{key}" for key in settings(SweepSettings)]
    keys += [
        "hydra.searchpath",
        "hydra/sweeper",
        "hydra.job.env_set",
        "--config-dir",
        "-cd",
        "+x",
        "~x",
    ]
    assert len(keys) > 60
    words = " ".join(f"'{key}={HOSTILE}'" for key in keys)
    (theirs.root / "commands.jsonl").unlink()
    theirs.append_command(
        {
            "command": f"python -m vitsweep -m {words}",
            "cells": theirs.cell_ids(),
            "hydra": [f"{key}={HOSTILE}" for key in keys],
        }
    )
    assert str(retried(theirs)).count(HOSTILE) > 30, "this user's own"
    text = (theirs.root / "commands.jsonl").read_text()
    (theirs.root / "commands.jsonl").write_text(text.replace('"mark"', '"was"'))
    assert HOSTILE not in str(retried(Store(theirs.root)))


def test_cells_of_a_cluster_do_not_run_here_unless_that_is_typed(theirs: Store) -> None:
    line: dict[str, Any] = {"command": "python -m vitsweep -m hydra/launcher=slurm x"}
    (theirs.root / "commands.jsonl").unlink()
    theirs.append_command(line | {"cells": theirs.cell_ids()})
    with pytest.raises(VitsweepError, match=r"hydra/launcher=slurm.*earlier version"):
        retried(Store(theirs.root))
    line["hydra"] = ["hydra/launcher=slurm", "hydra.launcher.partition=a", "hydra.mode=MULTIRUN"]
    (theirs.root / "commands.jsonl").unlink()
    theirs.append_command(line | {"cells": theirs.cell_ids()})
    text = (theirs.root / "commands.jsonl").read_text()
    [own] = retried(theirs)
    assert "hydra.launcher.partition=a" in own
    assert "hydra.mode=MULTIRUN" not in own
    (theirs.root / "commands.jsonl").write_text(text.replace('"mark"', '"was"'))
    with pytest.raises(
        VitsweepError, match=r"hydra/launcher=slurm.*somebody else[^$]*hydra/launcher=local"
    ):
        retried(Store(theirs.root))
    [typed] = retried(Store(theirs.root), "hydra/launcher=local")
    assert "hydra.launcher.partition=a" not in typed


@pytest.mark.parametrize("home", ["/proc", None])
def test_plain_cells_run_again_where_no_key_can_be_kept(
    theirs: Store, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(
        pwd, "getpwuid", {}.__getitem__
    )  # as in a container, for a number without a name
    if home:
        monkeypatch.setenv("HOME", home)
    assert ids_of(retried(theirs)) == {*theirs.cell_ids()}
    own = frozen(theirs, "seed=3", "precision=O1", "task.resume_from=/mine", "task=train")
    [cell_id] = own.entries
    assert read_cell(theirs, cell_id).task.resume_from == "/mine", "this command froze it"
    with pytest.raises(VitsweepError, match=r"task\.resume_from=/mine"):
        read_cell(Store(theirs.root), cell_id)


def test_a_retry_keeps_the_baselines_that_were_noted(theirs: Store) -> None:
    cells = frozen(theirs, "precision=bf16", "sweep.baseline={precision: O1, layout: batch_second}")
    text = (theirs.root / "commands.jsonl").read_text().replace('"mark"', '"was"')
    (theirs.root / "commands.jsonl").write_text(text)
    for cell_id in cells.entries:
        changed(theirs, cell_id)
    before = Store(theirs.root).baselines()
    after: dict[str, str | None] = {}
    for _, *overrides in retried(Store(theirs.root)):
        after |= plan_of(expand(overrides, COMPOSER), LAPTOP, COMPOSER).baselines
    assert after == before


def test_a_page_says_whose_command_it_shows(theirs: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def page() -> str:
        return render("s", SweepTables.of(Store(theirs.root)), [])

    foreign = page()
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs.root.parent / "theirs"))
    own = page()
    first = "<pre>python -m vitsweep</pre>"
    begin = own.index('id="reproduce"')
    assert "<p>" not in own[begin : own.index(first)]
    assert "<p>" in foreign[begin : foreign.index(first)]
