"""Damaged images are told once and whole, by loader workers of a rank too."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command import Command
from vitsweep.data.damaged_images import DAMAGED_LIST, read_damaged


def write_folder(root: Path, *, hidden: bool) -> set[str]:
    """Write 60 images, 12 of them damaged: inside of their pixels, or cut off."""
    random, damaged = np.random.default_rng(0), set()
    for index in range(60):
        path = root / "train" / ("ant", "bee")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
        if index % 5 == 0:
            content = path.read_bytes()
            middle = content[:45] + bytes(15) + content[60:]
            path.write_bytes(middle if hidden else content[:60])
            damaged.add(str(path))
    return damaged


def asked(root: Path, share: float) -> tuple[str, ...]:
    return (
        "data=image_folder", f"data.folder={root}", "batch.resolution_px=8", "model.patch_px=4",
        "data.num_workers=1", "batch.images_per_step=15", "resources.ranks_per_node=1",
        f"data.max_damaged_share={share}", "sweep.name=pictures",
    )  # fmt: skip


@pytest.mark.slow
def test_damaged_images_are_reported_before_the_first_cell_or_by_who_decodes_them(
    vitsweep: Command,
) -> None:
    whole, cut = vitsweep.folder / "whole_ends", vitsweep.folder / "cut_off"
    sweep = vitsweep.folder / "results" / "pictures"
    damaged = write_folder(cut, hidden=False)
    done = vitsweep(*asked(cut, 0.05))
    assert done.returncode == 2, done.stdout
    assert "`train`" in " ".join(done.stderr.split())
    assert all(Path(image).name in done.stderr for image in damaged)
    assert not sweep.parent.exists(), "nothing was frozen"

    damaged = write_folder(whole, hidden=True)
    done = vitsweep(*asked(whole, 0.05))
    assert done.returncode == 3, done.stderr
    said = " ".join(done.stdout.split())
    assert "`data.max_damaged_share=0.05`" in said
    assert f"`results/pictures/{DAMAGED_LIST}` names each" in said
    assert 3 < len(read_damaged(sweep)), "more than the share allows"
    assert set(read_damaged(sweep)) <= damaged
    assert not list(sweep.glob("cells/*/attempts/*/damaged-*"))

    again = vitsweep(*asked(whole, 0.05), "sweep.retry=[failed]")
    assert again.returncode == 2, "the list is known to the next look"

    (sweep / DAMAGED_LIST).unlink()
    measured = vitsweep(*asked(whole, 0.3))
    assert measured.returncode == 0, measured.stdout + measured.stderr
    found = (sweep / DAMAGED_LIST).read_text().splitlines()
    assert f"{len(found)} images" in measured.stdout
    assert 0 < len(found) == len(read_damaged(sweep))
    assert set(read_damaged(sweep)) <= damaged
