"""An anonymous bundle names no host, no user and no path, in any byte of any file."""

import gzip
import re
import tarfile
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.extras.bundle.bundling import HERE, bundled
from tests.extras.laboratory import laboratory
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.bundle.check import check
from vitsweep.extras.bundle.pack import Anonymizer, extract, write_bundle
from vitsweep.files import append_line
from vitsweep.report import figures
from vitsweep.results.store import Store

HOST, USER, INSTITUTE = "gpu-node-17.cs.uni.example", "marie.curie", "Sorbonne"
NAMES = (
    "gpu-node-17",
    "uni.example",
    "curie",
    "sorbonne",
    "10.1.2.3",
    "/home/",
    "/scratch",
    "5ecret",
    "gpu-node-",
    "uni-zebra",
    "zebra",
    "kiwi12",
    "dmoreau",
)
LOG = f"""Traceback in /home/{USER}/project/vitsweep/cell.py, line 3
connect tcp://10.1.2.3:29500 and 10.1.2.3 from {HOST} and GPU-NODE-17
data in /scratch/{USER}/imagenet, mail {USER}@sorbonne.example, https://user:5ecret@git.example/x
gpu-node-17.hpc.uni-zebra.example: SLURM_NODELIST=gpu-node-[01-04] MASTER_ADDR=gpu-node-3, hostname: kiwi12
nodes gpu-node-[01-04,07],z[001-008], rank 2 on gpu-node-23:29500, /home/dmoreau/x of dmoreau
wandb: Currently logged in as: {USER} (zebra-team). WANDB_ENTITY=zebra-team, run zebra-team/x
"""


@pytest.fixture(autouse=True)
def one_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "CHARTS", [c for c in figures.CHARTS if c.name == "speedup"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The sweep of Marie Curie, whose records, commands, diffs and logs name her and her machine."""
    environment = {"host": HOST, "node": "gpu-node-17", "nodes_used": "gpu-node-17,gpu-node-18"}
    environment |= {"instruments_reason": f"no trace in /home/{USER}/tmp", "device": "A machine"}
    folder = tmp_path_factory.mktemp("lab") / "first"
    store = laboratory(folder, "optimizer=adamw_foreach", environment=environment)
    for cell_id in store.cell_ids():
        attempt = store.cell(cell_id) / "attempts" / "b0-aa.1"
        attempt.mkdir(parents=True)
        (attempt / "rank0.log").write_text(LOG)
    [diff] = (store.root / "code").glob("*.diff")
    text = diff.read_text() + f"+# {USER} of the {INSTITUTE}, /home/{USER}/notes.txt\n"
    diff.write_text(text)
    append_line(
        store.root / "commands.jsonl",
        {
            "command": f"python -m vitsweep sweep.folder=/home/{USER}/r hydra.launcher.account={USER}"
        },
    )
    return store


def test_no_name_host_or_path_is_left_and_the_check_passes(store: Store, tmp_path: Path) -> None:
    made = write_bundle(
        store, tmp_path / "b.tar.gz", drawn_by=HERE, anonymous=True, hide=[INSTITUTE]
    )
    assert re.match(r"hidden: \d+ hosts, \d+ users?, 1 name, \d+ paths \(", made.notes[0])
    assert INSTITUTE.lower() in made.notes[0]
    root = extract(tmp_path / "b.tar.gz", tmp_path / "place")
    with gzip.open(tmp_path / "b.tar.gz") as packed:
        everything = [packed.read().decode("latin-1")]
    for path in root.rglob("*.parquet"):
        everything += [str(pq.read_schema(path).metadata), pd.read_parquet(path).to_csv()]
    text = "\n".join(everything).lower()
    assert {name for name in NAMES if name in text} == set()
    assert re.search(r"host-\d", text)
    assert str(store.root.parent).lower() not in text
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in archive} == {(0, 0, "", "", 0)}
    checked = check(root, HERE)
    assert checked.faults == ()
    assert len(checked.claims) == 1
    frozen = checked.store.frozen(checked.claims[0].cell_id)
    assert (root / frozen["code"]["git_diff"]).is_file()
    assert not any(map(checked.store.is_own_cell, checked.store.cell_ids()))


def test_a_bundle_with_names_keeps_them(store: Store, tmp_path: Path) -> None:
    root = extract(bundled(store, tmp_path / "b.tar.gz"), tmp_path / "place")
    assert LOG in [path.read_text() for path in root.rglob("rank0.log")]
    assert store.is_own_cell(store.cell_ids()[0])


def test_words_that_are_settings_stay_where_they_are_no_path_and_are_not_hidden_by_request() -> (
    None
):
    hidden = Anonymizer(["vm"], ["adam"], [], ["adam", "adamw_loop"])
    assert hidden.text("optimizer=adam of vm in /home/adam/x/run.py, vmap") == (
        "optimizer=adam of host-1 in /hidden/run.py, vmap"
    )
    assert hidden.kept == ["adam"]
    inside = Anonymizer([], ["alice"], [], ["alicepkg.ViT", "alicepkg"])
    assert inside.text("by alice: git@github.com:alice2/x.git alicepkg.ViT") == (
        "by user-1: name@hidden alicepkg.ViT"
    )
    assert inside.inside == {"alicepkg": "alice"}
    assert inside.text("of fe80::8c1:2ff:fe03:4%eth0 and 2001:db8::7") == "of ::%eth0 and ::"
    with pytest.raises(BadValueError, match="--hide sgd"):
        Anonymizer([], [], ["sgd"], ["sgd"])


@pytest.mark.parametrize(
    "text",
    [
        "images/s",
        "a/b.py",
        "+++ b/vitsweep/cell.py",
        "/dev/null",
        "127.0.0.1",
        "torch 2.13.0",
        "at 23:59:01 in a::b of [::1] with x[::2] and 4:30",
        "1 / 2",
        "losses[0] + x[1, 2] * a[1:3]",
    ],
)
def test_what_is_no_path_or_address_stays(text: str) -> None:
    assert Anonymizer(["node"], ["me"], [], []).text(text) == text


def test_a_word_that_is_left_stops_the_bundle(tmp_path: Path) -> None:
    pd.DataFrame({"reason": ["by Curie"]}).to_parquet(tmp_path / "cells.parquet")
    with pytest.raises(VitsweepError, match=r"`cells.parquet` still holds `Curie`"):
        Anonymizer([], ["curie"], [], []).require_none(tmp_path, ["cells.parquet"])
