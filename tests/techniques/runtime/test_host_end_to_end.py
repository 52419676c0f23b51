"""Whole commands with the groups that work on the host: what was asked for is in force and recorded."""

from pathlib import Path

import pytest

from tests.command import NO_REPORT, Command
from tests.data.pictures import write_folder

NO_BASELINE = ("sweep.baseline=null", "measurement.prove=none", "resources.ranks_per_node=2")


@pytest.mark.full
def test_settings_of_a_process_are_in_force_and_recorded(tmp_path: Path) -> None:
    command = Command(tmp_path)
    possible = ["plain", "bind_cores", "gc_scheduled"]
    done = command("-m", f"runtime={','.join(possible)}", *NO_BASELINE)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = command.cells().set_index("runtime")
    assert set(cells["status"]) == {"measured"}
    cores = cells["cores_allowed"].astype(int)
    assert cores["bind_cores"] == cores["plain"] // 2
    assert cells["host_allocator"]["plain"] == "libc"
    assert set(cells["attention_kernel"]) == {"flash (cpu)"}


def test_variables_of_a_cell_are_those_of_its_ranks_and_stand_in_its_record(
    vitsweep: Command,
) -> None:
    seen = vitsweep.folder / "seen"
    swept = "runtime.variables=null,{NCCL_ALGO:Ring,CUDA_DEVICE_MAX_CONNECTIONS:1}"
    done = vitsweep(
        "-m", swept, "model=module", "model.target=tests.variables_seen.build", "data=digits",
        "batch.images_per_step=8", "measurement=smoke", "measurement.blocks=1", *NO_BASELINE,
        f"++model.arguments.seen_in='{seen}'", NO_REPORT, quick=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(seen.read_text().splitlines()) == {"unset unset", "Ring 1"}
    cells = vitsweep.cells().set_index("runtime.variables.NCCL_ALGO")
    assert set(cells["status"]) == {"measured"}
    assert cells["runtime.variables.CUDA_DEVICE_MAX_CONNECTIONS"]["Ring"] == "1"
    assert "NCCL_ALGO=Ring" in done.stdout
    again = vitsweep(*done.args, quick=False)
    assert "measured already" in again.stderr


@pytest.mark.full
def test_loaders_train_the_same_and_share_one_file_of_pixels(tmp_path: Path) -> None:
    command, root = Command(tmp_path), write_folder(tmp_path / "pictures")
    done = command(
        "-m", "loader=workers,decoded_cache", *NO_BASELINE, "data=image_folder",
        f"data.folder={root}", "data.num_workers=1", "batch.resolution_px=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = command.cells()
    assert set(cells["status"]) == {"measured"}
    assert cells["loss_last"].nunique() == 1
    assert len(list((tmp_path / "results" / "decoded_images").glob("*/pixels.bin"))) == 1
