"""A rank's place in the mesh, and where it comes from; checks of a run over ranks that are told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.cells_and_worlds import world
from tests.training.alone import alone
from vitsweep import cell as module
from vitsweep.cell import StoppedError, _refuse_skipped_graphs, _refuse_stops, _skipped
from vitsweep.errors import VitsweepError
from vitsweep.job_environment import environment_rank
from vitsweep.measure.environment import Compiled
from vitsweep.spec.resources import AXES
from vitsweep.world import World, process_flags_kept

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
)


def test_a_rank_is_that_of_torchrun_or_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment_rank() is None
    monkeypatch.setenv("RANK", "3")
    assert environment_rank() is None
    for name, number in (("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "8")):
        monkeypatch.setenv(name, number)
    assert environment_rank() == (5, 0, 8)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert environment_rank() == (5, 1, 8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert environment_rank() == (3, 0, 4)


class Mesh:
    """Stands for torch's mesh: says which axes were asked for."""

    mesh_dim_names = ("own",)

    def __init__(self, asked: Any = ()) -> None:
        self.asked = asked

    def __getitem__(self, names: Any) -> "Mesh":
        return Mesh(names)

    def _flatten(self, name: str) -> "Mesh":
        return Mesh((self.asked, name))

    def get_group(self) -> Any:
        return self.asked


def placed(rank: int = 0, **degrees: int) -> World:
    found = world(rank, **degrees)
    return World(**(vars(found) | {"mesh": Mesh()}))


def test_an_axis_of_one_rank_is_that_of_the_rank_alone() -> None:
    two = placed(shard=2, ring=2)
    assert two.axis("shard").asked == "shard"  # type: ignore[attr-defined]
    assert two.axis("replicate").asked == "alone"  # type: ignore[attr-defined]
    assert two.token_group() == "ring"
    assert placed(ring=2, ulysses=2).token_group()[1] == "token"
    assert placed(shard=2).token_group() == "alone"
    assert two.gradient_group() is None, "all ranks"
    assert placed(shard=2, tensor=2).gradient_group() == "shard"
    assert placed(replicate=2, shard=2, pipeline=2).gradient_group() == (
        ("replicate", "shard"),
        "gradient",
    )
    assert world(0, shard=2).gradient_group() is None
    assert placed(replicate=2, shard=2).state_mesh(replicated=True).asked == ("replicate", "own")  # type: ignore[attr-defined]
    assert placed(shard=2, ring=2).state_mesh(replicated=False).asked == (
        ("shard", "ring"),
        "state",
    )  # type: ignore[attr-defined]


def test_replicas_are_numbered_over_copies_and_their_shards() -> None:
    degrees = {"replicate": 2, "shard": 3}
    assert [placed(rank, **degrees).data_parallel_rank for rank in range(6)] == [0, 1, 2, 3, 4, 5]
    assert placed(**degrees).data_parallel_size == 6
    for axis in AXES:
        if axis not in degrees:
            ranks = [placed(rank, shard=2, **{axis: 2}).data_parallel_rank for rank in range(4)]
            assert sorted(ranks) == [0, 0, 1, 1], axis


def test_flags_of_the_process_are_as_they_were() -> None:
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    was = cudnn.benchmark, cudnn.allow_tf32
    with process_flags_kept():
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        cudnn.benchmark, cudnn.allow_tf32 = not was[0], not was[1]
    assert (cudnn.benchmark, cudnn.allow_tf32) == was
    assert torch.get_float32_matmul_precision() == before


def test_the_rank_that_stood_still_longest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gathered", lambda seconds: [0.0, 4.0, 9.0])
    with pytest.raises(StoppedError, match=r"^Rank 2 .* 9 s"):
        _refuse_stops(0.0)
    monkeypatch.setattr(module, "gathered", lambda seconds: [0.0, 0.0])
    _refuse_stops(0.0)


def test_figures_of_cuda_graphs_that_were_left_out_are_refused() -> None:
    for replays, skipped, is_refused in (
        (True, 1, True),
        (True, 0, False),
        (True, None, False),
        (False, 1, False),
    ):
        cell: Any = SimpleNamespace(compilation=SimpleNamespace(replays_graphs=replays))
        compiled = Compiled(1, 1.0, skipped)
        if is_refused:
            with pytest.raises(VitsweepError):
                _refuse_skipped_graphs(cell, compiled)
        else:
            _refuse_skipped_graphs(cell, compiled)


def test_skipped_updates_are_those_of_the_timed_steps() -> None:
    flags = [torch.tensor(float(flag)) for flag in (1, 0, 1)]
    assert _skipped(SimpleNamespace(skipped=flags), 2) == [True, False]  # type: ignore[arg-type]
    assert _skipped(SimpleNamespace(skipped=[]), 2) == [False, False]  # type: ignore[arg-type]


def test_a_mesh_of_another_cell_is_refused() -> None:
    from vitsweep.model.build import build_model
    from vitsweep.parallelize import parallelize

    with pytest.raises(VitsweepError):
        parallelize(build_model(alone()), alone(), world(0, shard=2))
