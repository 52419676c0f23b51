"""`import vitsweep`: the functions of the command line, in Python."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import vitsweep
from tests.builders import run as run_of
from tests.cells import TINY
from tests.command import QUICK
from vitsweep.api.session import as_overrides
from vitsweep.api.sweep import Report, Sweep
from vitsweep.cli.main import run
from vitsweep.launchers.slurm.state import status
from vitsweep.results.record import Status
from vitsweep.results.store import Store

SCRIPT = f"""
print("The script runs.")
import vitsweep

sweep = vitsweep.sweep({list(QUICK)}, precision=["fp32", "O1"], name="mine")
assert list(sweep.cells["status"]) == ["measured"] * 2, sweep.cells["reason"]
assert set(sweep.speedups()["sweep"]) == {{"mine"}} and len(sweep.runs) == 2
assert set(sweep.status()["status"]) == {{"measured"}}
again = vitsweep.sweep({list(QUICK)}, precision=["fp32", "O1"], name="mine")
assert len(again.runs) == 2, "nothing is measured twice"
try:
    vitsweep.sweep("precision=o1")
except vitsweep.BadValueError as error:
    print(error)
print(sweep)
"""


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    fresh = {
        "VITSWEEP_PREDICT": "always",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }  # without traces
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=500,
        env=os.environ | fresh,
    )  # fmt: skip


def test_settings_by_name_are_overrides():
    for overrides, settings, expected in [
        ("precision=O1,O2 seed=1", {}, ["precision=O1,O2", "seed=1"]),
        (["seed=1"], {"precision": ["O1", "O2"]}, ["seed=1", "precision=O1,O2"]),
        ((), {"batch": {"images_per_step": [32, 64]}}, ["batch.images_per_step=32,64"]),
        ((), {"model": "vit_small", "seed": 3}, ["model=vit_small", "seed=3"]),
        ((), {"model": {"arguments": {"depth": [2, 4]}}}, ["++model.arguments.depth=2,4"]),
        ((), {"sweep": {"baseline": None}}, ["sweep.baseline=null"]),
        ((), {"sweep": {"question": "Is it, then?"}}, ["sweep.question='Is it, then?'"]),
        ((), {"batch": {"images_per_step": range(8, 33, 8)}}, ["batch.images_per_step=8,16,24,32"]),
        ((), {"seed": np.arange(3)}, ["seed=0,1,2"]),
        ((), {"seed": np.int64(8)}, ["seed=8"]),
        ((), {"seed": (n for n in (1, 2))}, ["seed=1,2"]),
        ((), {"data": {"folder": Path("/data/imagenet")}}, ["data.folder='/data/imagenet'"]),
    ]:
        assert as_overrides(overrides, settings) == expected


def test_a_list_without_values_is_refused_by_its_key():
    with pytest.raises(vitsweep.BadValueError, match=r"`batch\.images_per_step="):
        as_overrides((), {"batch": {"images_per_step": []}})
    with pytest.raises(vitsweep.BadValueError, match="`3`"):
        as_overrides([3], {})


@pytest.mark.parametrize("value", [object(), b"O1", [1, {2: object}], np.datetime64("2026-01-01")])
def test_a_value_that_no_setting_can_have_is_refused_by_its_key(value):
    with pytest.raises(vitsweep.BadValueError, match=r"^`batch\.images_per_step=.*`"):
        as_overrides((), {"batch": {"images_per_step": value}})


def test_a_key_that_is_given_twice_is_refused():
    with pytest.raises(vitsweep.BadValueError, match=r"`precision=O1`.*`precision=O2`"):
        vitsweep.plan(["precision=O1"], precision="O2")
    with pytest.raises(vitsweep.BadValueError, match=r"`sweep\.name=a`.*`sweep\.name=b`"):
        vitsweep.plan("sweep.name=a", name="b")


def test_a_folder_without_a_sweep_is_refused():
    with pytest.raises(vitsweep.VitsweepError, match="`/nonexistent`"):
        vitsweep.Sweep("/nonexistent").report()


def test_importing_it_loads_nothing_else():
    code = (
        "import sys, vitsweep; dir(vitsweep); print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for package in ("torch", "pandas", "numpy", "hydra", "rich", "pydantic"):
        assert f"'{package}'" not in shown.stdout


def test_every_public_name_is_there_and_documented():
    for name in set(vitsweep.__all__) - {"__version__"}:
        assert getattr(vitsweep, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'sweeps'"):
        vitsweep.sweeps  # noqa: B018


def test_a_plan_is_a_table_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = vitsweep.plan([*TINY, "mesh.tensor=1,2"], precision=["O1", "O2"])
    assert list(table["state"]) == ["runnable"] * 2 + ["invalid"] * 2 + ["runnable"]
    assert list(table["precision"][:4]) == ["O1", "O2"] * 2
    assert table["is_baseline"].sum() == 1
    assert list(table["runs"]) == [6, 6, 0, 0, 6], "a screening run and five blocks"
    assert "`mesh.tensor=2`" in table["reasons"][2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        (["mesh.tensor=2"], 2, "`mesh.tensor=2`"),
        (["mesh.tensor=1,2"], 0, "invalid 1"),
        (["resources.ranks_per_node=64", "batch.scope=per_replica"], 0, "64 ranks"),
        (["resources.nodes=2", "batch.scope=per_replica"], 0, "network"),
    ],
)
def test_a_typed_plan_says_what_its_cells_would_show_and_fails_where_none_can_run(
    typed, code, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "--no-predict", *TINY, *typed]) == code
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overrides": "precision=o2"}, "did you mean `precision=O2`?"),
        ({"overrides": "hydra.run.dir=x"}, "`hydra.run.dir=x` changes nothing"),
        ({"overrides": "hydra/launcher=basic"}, "`hydra/launcher=basic`"),
        ({"overrides": "hydra/sweeper=basic"}, "`hydra/sweeper=basic`"),
        ({"config_dir": "nosuch"}, "`--config-dir nosuch`"),
        ({"launcher": "lokal"}, "lokal"),
        ({"overrides": "plan"}, "`plan` is no override"),
    ],
)
def test_mistakes_are_exceptions_with_the_text_of_the_command_line(arguments, words):
    with pytest.raises(vitsweep.VitsweepError) as refused:
        vitsweep.plan(**arguments)
    assert words in str(refused.value)


@pytest.mark.parametrize("wrong", [5, None, {"precision": "O1"}, b"O1", True])
def test_what_is_no_list_of_overrides_is_refused(wrong):
    with pytest.raises(vitsweep.BadValueError, match=re.escape(f"`{wrong!r}`")):
        vitsweep.plan(wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"minutes": 3}, "did you mean `sweep.minutes=3`?"),
        ({"replicate": "seed"}, "did you mean `sweep.replicate=seed`?"),
        ({"overrides": "minutes=3"}, "did you mean `sweep.minutes=3`?"),
        ({"overrides": "+limit.first=3"}, "did you mean `sweep.limit.first=3`?"),
    ],
)  # fmt: skip
def test_a_key_of_sweep_at_top_level_says_where_it_stands(settings, words):
    with pytest.raises(vitsweep.BadValueError) as refused:
        vitsweep.plan(**settings)
    assert words in str(refused.value)
    assert "there are" not in str(refused.value)


def test_what_hydra_cannot_remove_is_refused() -> None:
    with pytest.raises(vitsweep.BadValueError, match="`machine="):
        vitsweep.plan(["~machine=[]"])


def test_a_sweep_all_of_whose_cells_are_refused_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vitsweep.ImpossibleCellError, match=r"mesh\.tensor=2"):
        vitsweep.sweep("mesh.tensor=2", show=False)
    assert not [*tmp_path.iterdir()], "no folder stays"
    (tmp_path / "results").mkdir()
    with pytest.raises(vitsweep.ImpossibleCellError):
        vitsweep.sweep("mesh.tensor=2", show=False)
    assert not [*(tmp_path / "results").iterdir()], "what was there before stays"


def test_a_sweep_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vitsweep.VitsweepError, match="no sweep `nosuch`"):
        vitsweep.load("nosuch")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A baseline, a cell that is twice as fast, and one that ran out of memory."""
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "results" / "small").create()
    for n in range(3):
        store.save_run(run_of("base", f"b{n}", 100 + n, minute=n))
        store.save_run(run_of("fast", f"b{n}", 200 + n, minute=n, precision="O1"))
    store.save_run(
        run_of("dead", status=Status.out_of_memory, reason="no room", precision="O2", minute=9)
    )
    store.append_command({"baselines": dict.fromkeys(("base", "fast", "dead"), "base")})
    return store


def test_a_sweep_has_its_speedups_in_order_and_the_status_of_each_cell(small):
    for found in (Sweep(small), Sweep(str(small.root)), vitsweep.load("small"), vitsweep.load()):
        assert (found.name, found.folder.resolve()) == ("small", small.root)
        assert repr(found).endswith(": 2 measured, 1 out of memory>")
    table = found.speedups()
    assert list(table["cell_id"]) == ["fast", "base", "dead"]
    assert list(table.index) == [0, 1, 2]
    assert list(table.columns[:2]) == ["cell", "precision"]
    assert table["speedup"].round(2).tolist()[:2] == [1.99, 1.0]
    states = found.status().set_index("cell_id")
    assert states["status"].to_dict() == {
        "base": "measured",
        "fast": "measured",
        "dead": "out_of_memory",
    }
    assert states.loc["dead", "reason"] == "no room"
    assert len(found.runs) == 7
    with pytest.raises(AttributeError, match="nosuch"):
        found.nosuch  # noqa: B018


def test_waiting_ends_with_the_jobs_or_after_the_minutes(small, monkeypatch):
    assert Sweep(small).wait().name == "small"
    assert (small.root / "cells.csv").exists(), "no job is live"
    seen = []
    monkeypatch.setattr(status, "wait_for_jobs", lambda store, seconds: seen.append(seconds))
    with pytest.raises(TimeoutError):
        Sweep(small).wait(minutes=1.5)
    monkeypatch.setattr(status, "wait_for_jobs", lambda store, seconds: not seen.append(seconds))
    Sweep(small).wait()
    assert seen == [90, None]


class Tags(HTMLParser):
    """The tags of a page, and the attributes of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_notebook_shows_a_table_of_the_rows_and_a_chart_where_there_are_speedups(small, tmp_path):
    tags = [tag for tag, _ in Tags(vitsweep.load("small")._repr_html_()).found]
    assert (tags.count("svg"), tags.count("tr"), tags.count("th")) == (1, 4, 7)
    alone = Store(tmp_path / "alone").create()
    assert "<table" not in Sweep(alone)._repr_html_()
    assert repr(Sweep(alone)).partition(": ")[2] not in ("", ">")
    alone.save_run(run_of("base"))
    assert "<svg" not in Sweep(alone)._repr_html_()
    (page := tmp_path / "index.html").write_text('<p class="a">1 &lt; 2</p>')
    [(tag, attributes)] = Tags(Report(page)._repr_html_()).found
    assert (tag, attributes["srcdoc"]) == ("iframe", page.read_text())
    assert os.fspath(Report(page)) == str(Report(page)) == str(page)


@pytest.mark.full
@pytest.mark.slow
def test_a_script_without_a_main_guard_measures_a_sweep(tmp_path):
    done = python(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The script runs.") == 1, "processes that trace run it as well"
    assert "`precision=O1`" in done.stdout
    assert "<vitsweep.Sweep 'mine' in results/mine: 2 measured>" in done.stdout
    assert [done.stderr.count(f"[{n}/2] ") for n in (1, 2)] == [1, 1], "one line of progress a run"


def shown_in_a_notebook(cells: list[str], folder: Path) -> list[list[dict[str, str]]]:
    """Execute a notebook; return what each of its cells shows, by MIME type."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    return [[o.get("data", {}) for o in cell["outputs"]] for cell in notebook.cells]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
def test_a_notebook_measures_and_shows_a_sweep(tmp_path):
    cells = [
        "import vitsweep",
        f"vitsweep.plan({list(QUICK)}, precision=['O1', 'O2'])",
        f"sweep = vitsweep.sweep({list(QUICK)}, precision=['O1', 'O2'], name='mine')",
        "sweep",
        "sweep.report()",
        "vitsweep.load('mine').speedups()",
    ]
    shown = shown_in_a_notebook(cells, tmp_path)
    assert "table" in shown[1][-1]["text/html"]
    assert shown[2], "progress"
    assert "<svg" in shown[3][-1]["text/html"]
    assert "<iframe" in shown[4][-1]["text/html"]
    assert "<table" in shown[5][-1]["text/html"]
