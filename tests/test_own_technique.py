"""examples/own_technique, copied outside of the checkout, and the page that explains it."""

import inspect
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.command import NO_REPORT, Command
from tests.documents import ROOT, blocks
from tests.test_own_model import QUICK
from vitsweep.spec.cell_spec import GROUPS

EXAMPLE = ROOT / "examples" / "own_technique"
PAGE = ROOT / "docs" / "extend" / "technique.md"


def test_the_page_shows_the_files_of_the_example():
    shown = {
        ROOT / b.file: b.text.partition("\n")[2] for b in blocks("python", "yaml") if b.page == PAGE
    }
    files = {p: p.read_text() for p in EXAMPLE.rglob("*") if p.suffix in (".py", ".yaml")}
    files.pop(EXAMPLE / "methods" / "__init__.py")
    assert shown == files


def test_the_methods_that_the_page_names_have_these_arguments():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .*$", PAGE.read_text(), re.MULTILINE)
    lines = {line.split(" | ")[0].strip("| "): line for line in PAGE.read_text().splitlines()}
    assert len(rows) == 11
    for row in rows:
        _, classes, methods, *_ = lines[row].strip("| ").split(" | ")
        for group in re.findall(r"\w+", row):
            assert GROUPS[group].__name__ in classes
            for name, arguments in re.findall(r"`(\w+)\(([\w, ]*)\)`", methods):
                own = [a for a in inspect.signature(getattr(GROUPS[group], name)).parameters]
                assert own == ["self", *filter(None, arguments.split(", "))]


def test_what_the_page_calls_the_proof_proves():
    first = [
        b.text.splitlines()[0] for b in blocks("bash") if b.page == PAGE and "vitsweep" in b.text
    ]
    assert first
    assert all("measurement.prove=twin" in command for command in first)


BROKEN = {
    "own_gradient_only": ("dist.reduce_scatter(own, parts, group=ctx.group)", "own = parts[0]"),
    "other_scale": ("torch.cat(parts, 2)", "torch.cat(parts, 2) * 1.01"),
    "own_keys_only": ("torch.cat(parts, 2)", "torch.cat([x for _ in parts], 2)"),
    "mixed_heads": ("torch.cat(parts, 2)", "torch.cat(parts, 2).roll(1, 1)"),
    "not_booked": ('with sent_as("activation"):', "if True:"),
}
"""Choice -> what its all-gather has in place of what the page has."""
GROSS = ("own_keys_only", "mixed_heads")
"""Those that change the output as well, and more than `other_scale` does."""


# 20 s: real cells on two ranks, each with a proof
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param([n for n in BROKEN if n not in GROSS], id="fine", marks=pytest.mark.slow),
        pytest.param([*BROKEN], id="all", marks=pytest.mark.full),
    ],
)
def test_the_method_of_the_page_stands_next_to_others_and_broken_ones_are_found(
    broken: list[str], tmp_path: Path
):
    mine = shutil.copytree(EXAMPLE, tmp_path / "mine")
    method, gather = (mine / "methods" / f"{n}.py" for n in ("gathered_keys", "all_gather"))
    for name in broken:
        said, instead = BROKEN[name]
        text = gather.read_text()
        assert said in text
        (mine / "methods" / f"{name}_gather.py").write_text(text.replace(said, instead))
        own = method.read_text().replace("methods.all_gather", f"methods.{name}_gather")
        (mine / "methods" / f"{name}.py").write_text(own)
        target = f"# Broken.\n_target_: methods.{name}.GatheredKeys\n"
        (mine / "conf" / "sequence_parallel" / f"{name}.yaml").write_text(target)

    done = Command(mine)(
        "--config-dir", "conf", "-m",
        f"sequence_parallel=gathered_keys,ring,dsp,{','.join(broken)}",
        "model=video_vit_nano", "data=moving_digits", "batch.images_per_step=8",
        "resources.ranks_per_node=2", "sweep.name=beside", NO_REPORT, *QUICK, quick=False,
    )  # fmt: skip

    assert done.returncode == 3, done.stdout + done.stderr
    cells = pd.read_parquet(mine / "results" / "beside" / "cells.parquet")
    cells = cells.set_index("sequence_parallel")
    wrong = broken[:-1]
    assert set(cells["status"][wrong]) == {"wrong"}, cells["reason"]
    assert cells["reason"][wrong].str.startswith("The nano twin's ").all(), "found by the proof"
    assert set(cells["status"].drop(wrong)) == {"measured"}, cells["reason"]
    ranks, images, tokens, width, attending = 2, 8, 8 * 16, 64, 2
    own = 4 * images * tokens // ranks * width
    sent = cells["activation_bytes_per_step"]
    assert sent["gathered_keys"] == (ranks - 1) * (4 * attending + 1) * own
    assert sent["dsp"] < sent["gathered_keys"] < sent["ring"]
    assert sent["not_booked"] == (ranks - 1) * own, (
        "what vitsweep itself gathers after the last norm"
    )
    lost = cells["unattributed_bytes_per_step"]
    assert lost["not_booked"] == (ranks - 1) * 4 * attending * own
    assert lost["gathered_keys"] == 0
