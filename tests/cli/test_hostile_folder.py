"""A sweep folder made by somebody who means harm: every reader ends in words, and touches nothing else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.builders import run
from tests.command import QUICK
from vitsweep.cli import VERBS, main
from vitsweep.files import append_line, remove
from vitsweep.results import pack, provenance
from vitsweep.results.pack import FILE
from vitsweep.results.record import Status
from vitsweep.results.store import Store

Trick = Callable[..., Any]
TRICKS: dict[str, Trick] = {}
PLACES: dict[str, str] = {}
"""Trick -> where it is played, of those after which all verbs go on: what others do then shows too."""
CELL = "cells/aa"
RUN = f"{CELL}/runs/aa-b0-0.json"
JOB = "jobs/a"


def trick(made: Trick) -> Trick:
    TRICKS[made.__name__] = made
    return made


def file_trick(called: str, name: str, make: Callable[[Path, Path], Any]) -> None:
    """A trick that makes something else of a file.

    Args:
        called: the trick.
        name: of the file in the sweep's folder.
        make: called with the file, and with what must stay as it is.
    """

    def play(sweep: Path, outside: Path, cell_id: str = "aa") -> None:
        path = sweep / name.replace("aa", cell_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, outside)

    TRICKS[called] = play
    if name in GO_ON:
        PLACES[called] = CELL if name.startswith(CELL) else name


GO_ON = (RUN, f"{CELL}/record.json", f"{CELL}/prediction.json", f"{CELL}/cell.yaml", "race.json",
         "commands.jsonl")  # fmt: skip
"""Files without which verbs go on, whatever stands in their place."""


def linked(name: str, target: str = "") -> None:
    """A trick that replaces a file by a link to the file, or the folder, that must stay as it is."""

    def link(path: Path, outside: Path) -> None:
        remove(path)
        path.symlink_to(target or (outside if "." not in name[1:] else outside / "profile"))

    file_trick(f"link {name}{target}", name, link)


for path in ("cells/pack.jsonl", ".lock", "report", "report/index.html", "cells.csv", "runs.parquet",
             f"{CELL}/record.json", f"{CELL}/runs", "cells", "jobs", "commands.jsonl", "race.json",
             f"{JOB}/slurm_id", f"{JOB}/tasks.jsonl", f"{CELL}/attempts.jsonl"):  # fmt: skip
    linked(path)
linked(RUN, "/dev/zero")


def text(name: str, content: str | bytes, called: str = "") -> None:
    """A trick that writes a file."""

    def write(path: Path, outside: Path) -> None:
        raw = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(raw.replace(b"OUTSIDE", str(outside).encode()))

    file_trick(f"{called or str(content)[:40]} in {name}", name, write)


EVIL = "model: {_target_: os.system, command: 'touch OUTSIDE/executed'}"
for name in (
    RUN,
    f"{CELL}/record.json",
    f"{CELL}/prediction.json",
    "race.json",
    f"{JOB}/array.json",
):
    text(name, "[" * 100_000, "deep nesting")
    text(name, '[{"cell_id": 7}]')
text(RUN, b"\xff\xfe\x00", "no UTF-8")
text("race.json", '{"cells": [{"cell_id": []}], "rounds": 3, "leader": {}, "level": "x"}')
text(
    f"{CELL}/record.json",
    '{"cell_id": "/tmp/vitsweep-hostile", "status": [], "images_per_second": "fast"}',
)
text(f"{CELL}/cell.yaml", "")
text(f"{CELL}/cell.yaml", f"overrides: []\ncell: {{{EVIL}}}\n", "foreign class")
text(f"{CELL}/cell.yaml", "!!python/object/apply:os.system ['touch OUTSIDE/executed']")
text(f"{CELL}/cell.yaml", "a: &a [x]\ncell: {model: *a}\noverrides: [*a]\n", "aliases")
text(f"{JOB}/slurm_id", "--user=root")
text(f"{JOB}/tasks.jsonl", '{"blocks": 3}\n')
text(
    f"{JOB}/tasks.jsonl",
    '{"blocks": [{"name": 1, "runs": [{"cell_id": "/tmp/vitsweep-hostile", "run_id": []}]}]}\n',
)
text(
    f"{JOB}/0.jsonl",
    '{"event": "run_start"}\n{"event": []}\n{}\n{"event": "job_end", "time": "x"}\n',
)
text(
    f"{CELL}/attempts.jsonl",
    '{"event": "start"}\n{"event": "start", "run_id": [], "attempt": "x"}\n',
)
text("commands.jsonl", '{"cells": 3, "baselines": [1], "metrics": {"a": 1}, "command": []}\n')
text("commands.jsonl", '{"cells": [[]], "baselines": {"aa": []}, "question": 3, "time": {}}\n')
text(
    "commands.jsonl", '{"cells": ["cc"]}\n{"command": "python -m vitsweep (\\"", "cells": ["cc"]}\n'
)
text("commands.jsonl", '{"command": "x", "metrics": {"a": {"function": "os.system", "unit": "", '
     '"label": "a", "better": null}}}\n')  # fmt: skip


@trick
def hostile_pack(sweep: Path, outside: Path) -> None:
    """Lines with true checksums: names that lead outside, no text, nesting, escapes, no record."""
    tree = json.loads((sweep / RUN).read_text()) | {"run_id": "x", "reason": "\x1b]0;x\x07"}
    names = [
        "../../home/profile",
        f"{outside}/runs/x.json",
        "aa/runs/../../x.json",
        "-x/cell.yaml",
        "aa/cell.yaml",
    ]
    with (sweep / "cells" / FILE).open("wb") as handle:
        pack.add(handle, {name: {"x": "\x1b[2J"} for name in names})
        pack.add(handle, {"aa/runs/x.json": tree, "aa/runs/y.json": tree, "aa/runs/z.json": []})
        pack.add(
            handle,
            {
                "aa/prediction.json": "[" * 9999,
                "bb/cell.yaml": EVIL,
                "dd/record.json": '{"a": "\x1b"}',
            },
        )
        for text in (
            b"\t" + b"[" * 99999,
            b"\t7",
            b"\t[7, []]",
            b"\xff\t{}",
            b"aa/attempts.jsonl\t[[]]",
        ):
            handle.write(b"%08x\t%b\n" % (crc32(text), text))


def packed(called: str, lines: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A trick that adds lines with true checksums to a pack, made from the record of a run."""

    def write(sweep: Path, outside: Path) -> None:
        with (sweep / "cells" / FILE).open("ab") as handle:
            pack.add(handle, lines(json.loads((sweep / RUN).read_text())))

    TRICKS[called] = write
    PLACES[called] = FILE


packed(
    "pack of cells with the names of others",
    lambda tree: {
        "bb/runs/aa-b0-0.json": tree,
        "aa/runs/aa-b0-0.json": tree | {"cell_id": "bb"},
        "zz/runs/zz-b0-0.json": tree | {"cell_id": "/tmp/vitsweep-hostile", "run_id": "zz-b0-0"},
        "zz/record.json": '{"cell_id": "/tmp/vitsweep-hostile", "status": "measured"}',
        "zz/cell.yaml": "cell_id: /tmp/vitsweep-hostile\noverrides: []\ncell: {}\n",
    },
)
packed(
    "pack of 400 digits",
    lambda tree: {
        RUN.removeprefix("cells/"): tree | {"metrics": {"images_per_second": 10**400}},
        "aa/runs/aa-b8-0.json": tree | {"run_id": "aa-b8-0", "position": 10**400},
        "aa/runs/aa-b9-0.json": tree | {"run_id": "aa-b9-0", "spec": {"seed": 10**4000}},
        "aa/prediction.json": f'{{"predicted_step_time_ms": {10**400}}}',
        "dd/record.json": f'{{"status": "failed", "seed": {10**400}}}',
        "dd/cell.yaml": f"overrides: []\ncell: {{seed: {10**400}}}\n",
    },
)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


DEEP = nested(900)
packed(
    "pack of deep nesting that JSON just reads",
    lambda tree: {
        RUN.removeprefix("cells/"): tree | {"environment": tree["environment"] | {"x": DEEP}},
        "aa/prediction.json": f'{{"a": {DEEP}}}',
        "dd/record.json": f'{{"status": "failed", "x": {DEEP}}}',
        "dd/cell.yaml": f"overrides: {DEEP}\ncell: {{a: {DEEP}}}\n",
    },
)


@trick
def pack_of_another_sweep(sweep: Path, outside: Path) -> None:
    """Whole, with the marks of the user who wrote it, and other texts of cells that are here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(sweep.parent / "theirs"))
        store = Store(sweep.parents[1] / "elsewhere").create()
        words = ["model=module", "model.target=theirs.build", f"sweep.name=$(touch {outside}/x)"]
        for cell_id in ("aa", "dd"):
            store.freeze(cell_id, {"cell_id": cell_id, "overrides": words, "cell": {"seed": 3}})
            store.save_run(run(cell_id, "b0", status=Status.failed, reason="x"))
        store.pack()
    shutil.move(store.cells / FILE, sweep / "cells" / FILE)


def special(kind: str, name: str, make: Callable[[Path], Any]) -> None:
    """A trick that puts something else in the place of a file."""

    def put(path: Path, outside: Path) -> None:
        remove(path)
        make(path)

    file_trick(f"{kind} {name}", name, put)


def endless(path: Path) -> None:
    with path.open("wb") as handle:
        handle.truncate(2**40)


for path in (RUN, f"cells/{FILE}", "race.json", f"{JOB}/0.jsonl"):
    special("endless", path, endless)
for path in (RUN, "commands.jsonl", f"cells/{FILE}"):
    special("pipe", path, os.mkfifo)
for path in (RUN, ".lock", "runs.parquet"):
    special("folder", path, Path.mkdir)


@trick
def pack_with_a_second_name(sweep: Path, outside: Path) -> None:
    os.link(outside / "profile", sweep / "cells" / FILE)


def changed(called: str, **changes: Any) -> None:
    """A trick that changes the record of a run."""

    def change(path: Path, outside: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    file_trick(called, RUN, change)


changed("absolute cell id", cell_id="/tmp/vitsweep-hostile")
changed("run id with a path", run_id="../../x")
changed("record of types", spec={"world_size": "four", "model": ["x"]}, environment={"device": {}})
changed("long integers", metrics={"images_per_second": 10**300, "step_time_ms": float("inf")})
changed("time that is a number", environment={"started_at": 7})
changed("odd samples", samples={"step_time_ms": [[1.0]], "warm_up_steps": 7, "skipped": []})
changed("formula and escapes", status="failed", reason="=cmd|' /C calc'!A0 \x1b]0;x\x07\x1b[2J")
changed(
    "page", status="failed", reason="</script><script>alert(1)</script><img src=x onerror=alert(1)>"
)


@trick
def cell_with_escapes(sweep: Path, outside: Path) -> None:
    (sweep / "cells" / "\x1b[2J -x").mkdir()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of somebody else's, which was collected here."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "theirs"))
        store = Store(folder / "results" / "sweep").create()
        for cell_id in ("aa", "bb"):
            precision = "O1" if cell_id == "bb" else "fp32"
            for block in ("b0", "b1"):
                store.save_run(run(cell_id, block, 100, precision=precision))
            store.freeze(cell_id, {"cell_id": cell_id, "overrides": [], "cell": {"seed": 0}})
        theirs = ["model=module", "model.target=theirs.build"]
        store.freeze("cc", {"cell_id": "cc", "overrides": theirs, "cell": {"seed": 0}})
        store.save_run(run("cc", "b0", status=Status.failed, reason="x"))
        store.append_command(
            {
                "command": "python -m vitsweep -m seed=0",
                "cells": ["aa", "bb", "cc"],
                "baselines": {"bb": "aa"},
            }
        )
        (store.root / JOB).mkdir(parents=True)
        block = {"name": "b0", "runs": [{"cell_id": "aa", "run_id": "aa-b9"}]}
        (store.root / JOB / "tasks.jsonl").write_text(json.dumps({"blocks": [block]}) + "\n")
        facts = {
            "time": 0,
            "num_jobs": 1,
            "max_attempts": 3,
            "request": {"nodes": 1, "ranks_per_node": 2},
        }
        (store.root / JOB / "array.json").write_text(json.dumps(facts))
        (store.root / JOB / "slurm_id").write_text("7")
        started = {"event": "job_start", "restart": 0, "array_id": "7"}
        append_line(store.root / JOB / "0.jsonl", started)
        patched.setenv("XDG_CACHE_HOME", str(folder / "mine"))
        patched.chdir(folder)
        assert main.run(COLLECT) == 0
    return folder


def fresh(prepared: Path, folder: Path, patched: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Copy the sweep into a new folder, the current one from now on; return it and a home that must stay."""
    shutil.copytree(prepared, folder)
    patched.setenv("XDG_CACHE_HOME", str(folder / "mine"))
    patched.setattr(provenance, "_trusted", False)  # `--trust` sets it for the process
    patched.chdir(folder)
    root, outside = folder / "results" / "sweep", folder / "home"
    shutil.copy(root / "cells.parquet", "kept.parquet")
    outside.mkdir()
    (outside / "profile").write_text("mine")
    return root, outside


COLLECT = ["collect", "sweep"]
LINES = [
    ["status", "sweep"],
    [*COLLECT, "--reconcile"],
    ["cancel", "sweep"],
    ["retry", "sweep", "--status", "failed,damaged"],
    ["pack", "sweep"],
]
"""Each trick meets all of these: together they call every reader of the folder."""
REPORT = ["report", "sweep"]
"""It takes seconds, and is met by what is shown in a page."""
FURTHER = [
    COLLECT,
    ["status", "--all"],
    ["gate", "sweep", "--against", "kept.parquet"],
    ["bundle", "sweep", "--to", "bundle.tar.gz"],
    ["export", "sweep", "--cell", "best", "--to", "cell.py", "--no-prove"],
    ["plan", "-m", "precision=fp32,O1", "sweep.name=sweep", "--no-predict"],
    ["explain", "aa", "--sweep", "sweep"],
    ["retry", "sweep", "--status", "failed,damaged", "--trust"],
    ["reproduce", "results/sweep", "--check"],
]
FURTHER = [words for words in FURTHER if words[0] in VERBS]
"""Each trick meets one of these, those with files of cells and all in the longest tests each of them."""
PAIR = [
    "seed=1",
    "seed=2",
    *QUICK,
    "resources.ranks_per_node=1",
    "sharding=none",
    "sweep.name=sweep",
]
MEASURING = [
    ["compare", *PAIR, "--minutes=0.001"],
    ["explain", *PAIR, "--blocks=1", "--steps=1"],
]
MEASURING = [words for words in MEASURING if words[0] in VERBS]
"""They add runs to the folder, which takes seconds."""


def no_harm(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Type a verb: it ends in words."""
    assert main.run(verb) in range(5), verb
    found = "".join(capsys.readouterr())
    assert "Traceback" not in found
    assert not any(letter in found for letter in "\x1b\x07\x9b"), (verb, found)


def untouched(outside: Path) -> bool:
    kept = {path.name: path.read_text() for path in outside.iterdir()}
    return kept == {"profile": "mine"} and not Path("/tmp/vitsweep-hostile").exists()


def folders() -> list[list[str]]:
    """Return the tricks of each folder: one where it may hide others, else one for each place.

    Those with a file of one cell are played in the first folder, each on a cell of its own.
    """
    together: list[list[str]] = [[]]
    for place in dict.fromkeys(PLACES.values()):
        names = [name for name in TRICKS if PLACES.get(name) == place]
        if place == CELL:
            together[0] += names
            continue
        together += [[] for _ in names[len(together) :]]
        for folder, name in zip(together, names, strict=False):
            folder.append(name)
    return together + [[name] for name in TRICKS if name not in PLACES]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute where nothing else runs: each folder meets six commands
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_folder_executes_nothing_and_is_reported_in_words(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for index, names in enumerate(folders()):
        sweep, outside = fresh(prepared, tmp_path / str(index), monkeypatch)
        of_cells = [name for name in names if PLACES.get(name) == CELL]
        add_cells(Store(sweep), len(of_cells))
        for name in names:
            more = (f"c{of_cells.index(name)}",) if name in of_cells else ()
            TRICKS[name](sweep, outside, *more)
        further = [REPORT, *FURTHER] if of_cells else [FURTHER[index % len(FURTHER)]]
        for verb in [*LINES, *further]:
            no_harm(verb, capsys)
        assert untouched(outside), names
        for csv in sweep.rglob("*.csv"):
            assert ",=cmd" not in csv.read_text()
        for page in sweep.rglob("index.html"):
            assert "<script>alert(1)" not in page.read_text()


def add_cells(store: Store, number: int) -> None:
    """Add measured cells of the one who wrote the sweep."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(store.root.parents[1] / "theirs"))
        for cell_id in (f"c{index}" for index in range(number)):
            for block in ("b0", "b1"):
                store.save_run(run(cell_id, block, 100))
            store.freeze(cell_id, {"cell_id": cell_id, "overrides": [], "cell": {"seed": 0}})


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRICKS)
def test_no_verb_executes_anything_of_a_hostile_folder(
    prepared: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for index, verb in enumerate([*LINES, *FURTHER, *MEASURING]):
        sweep, outside = fresh(prepared, tmp_path / str(index), monkeypatch)
        TRICKS[name](sweep, outside)
        no_harm(verb, capsys)
        assert untouched(outside), verb


def test_there_are_enough_tricks() -> None:
    assert len(TRICKS) >= 40


HOSTILE_WORDS = (
    "nosuch/../x;touch$IFS'executed'`touch executed`",
    "${oc.env:HOME}",
    "__import__('os').system('touch executed')",
)
"""A path and a shell's text; an interpolation; an expression."""


@pytest.mark.slow  # every option of every verb, with three words each
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_word_for_any_option_is_refused_or_harmless(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line for each option and place of each verb's parser: a new one needs no line here."""
    typed = {Path(word).name for word in HOSTILE_WORDS}  # `--to` writes where it is typed
    for verb in VERBS:
        fresh(prepared, tmp_path / verb, monkeypatch)
        actions = [a for a in VERBS[verb].parser()._actions if a.nargs != 0]
        options = [a.option_strings[0] for a in actions if a.required and a.option_strings]
        needed = [word for option in options for word in (option, "x")]
        named = "sweep" if any(a.dest == "sweep" for a in actions) else "x"
        for hostile in HOSTILE_WORDS:
            for action in actions:
                option = [named, action.option_strings[0]] if action.option_strings else []
                no_harm([verb, *needed, *option, hostile], capsys)
        assert not [*tmp_path.rglob("executed")]
        found = {path.name for path in (tmp_path / verb).iterdir()}
        assert found - typed <= {"results", "theirs", "mine", "home", "kept.parquet"}
