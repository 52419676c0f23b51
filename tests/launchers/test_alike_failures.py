"""A sweep that cannot work stops after four cells, and the same command goes on after the mend."""

import pytest
from PIL import Image

from tests.command import Command

pytestmark = pytest.mark.slow


def test_a_sweep_whose_data_cannot_be_read_stops_and_goes_on_after_the_mend(
    vitsweep: Command,
) -> None:
    picture = vitsweep.folder / "cat.png"
    picture.write_text("no picture")
    data = (
        "data=module", "data.target=tests.user_data.NoPicture", f"++data.arguments.file={picture}",
        "data.num_channels=1", "data.num_classes=10", "data.native_resolution_px=8", "data.num_workers=0",
        "resources.ranks_per_node=1",
    )  # fmt: skip
    grid = ("-m", "optimizer=adamw_loop,adamw_foreach,sgd_loop", "memory=keep_all,recompute_blocks")
    assert vitsweep(*data).returncode == 3  # the baseline, which may come late in a block
    done = vitsweep(*grid, *data)
    assert done.returncode == 3, done.stderr
    said = " ".join(done.stdout.split())
    assert "4 cells failed alike: UnidentifiedImageError: cannot identify image file" in said
    assert "the others (2) were not started" in said
    assert vitsweep.runs()["status"].tolist() == ["failed"] * 4

    Image.new("L", (8, 8)).save(picture)
    again = vitsweep(*grid, *data, "sweep.retry=[failed]")
    assert again.returncode == 0, again.stdout + again.stderr
    assert vitsweep.runs().groupby("status").size().to_dict() == {"failed": 4, "measured": 6}
