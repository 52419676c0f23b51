"""Bytes counted at the collectives equal the formula of each sharding, to the byte."""

import sys
import time
from collections.abc import Callable
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional

from tests.cells import cell
from tests.ranks import on_ranks, placed
from tests.techniques.sequence_parallel.cases import answers
from vitsweep.collectives.primitives import all_gather_single, reduce_scatter_single, sent_as
from vitsweep.measure.communication import (
    Collectives,
    communication_ms,
    counted_bytes,
    profile_collectives,
    transfers_ms,
)
from vitsweep.model.block import Block
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

WIDTH_3 = ("model.width=36", "model.num_heads=4", "model.mlp_width=70")
"""Sizes that neither 2 nor 4 divide everywhere: FSDP2 pads them."""

Shapes = dict[str, tuple[int, ...]]


def asked(ranks: int, *overrides: str) -> CellSpec:
    place = [f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1"]
    return cell(*WIDTH_3, *place, *overrides)


def shapes(spec: CellSpec) -> Shapes:
    return {name: tuple(p.shape) for name, p in build_model(spec).named_parameters()}


def sent_in_a_step(world: World, cells: list[CellSpec]) -> list[dict[str, Any]]:
    """What the third step sends: DDP agrees on its buckets before."""
    return [_sent(placed(world, spec), spec) for spec in cells]


def _sent(world: World, spec: CellSpec) -> dict[str, Any]:
    torch.manual_seed(spec.seed)
    trainer = parallelize(build_model(spec), spec, world)
    for _ in range(2):
        trainer.step(iter(my_share(spec, global_batch(spec, 0, world), world)))
    with counted_bytes() as sent:
        trainer.step(iter(my_share(spec, global_batch(spec, 0, world), world)))
    purposes = ("parameter", "gradient", "activation")
    return {p: sent.by_purpose[p] for p in purposes} | {"calls": sent.by_collective}


CELLS = [
    *(
        (ranks, f"sharding={name}")
        for ranks in (2, 4)
        for name in ("ddp", "zero1", "zero2", "fsdp")
    ),
    (4, "sharding=hsdp"),
    (2, "precision=O2", "sharding=ddp"),
    (2, "precision=O2", "sharding=fsdp"),
    (2, "precision=bf16", "sharding=fsdp"),
    (2, "precision=bf16_masters", "sharding=fsdp"),
    (2, "sharding=ddp", "batch.accumulation_steps=4"),
    (2, "sharding=fsdp", "sharding.blocks_per_unit=2"),
]
Counted = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """What a step of a cell sends; cells of as many ranks share their processes."""
    answers: dict[tuple[Any, ...], dict[str, Any]] = {}

    def count(ranks: int, *overrides: str) -> dict[str, Any]:
        if (ranks, *overrides) not in answers:
            keys = [key for key in CELLS if key[0] == ranks]
            cells, folder = [asked(*key) for key in keys], tmp_path_factory.mktemp("counted")
            of_ranks = on_ranks(ranks, sent_in_a_step, cells[0], cells, folder=folder)
            assert all(of_rank == of_ranks[0] for of_rank in of_ranks), "all ranks send the same"
            answers.update(zip(keys, of_ranks[0], strict=True))
        return answers[ranks, *overrides]

    return count


def whole(found: Shapes, width: int = 4) -> int:
    return width * sum(prod(shape) for shape in found.values())


def padded(found: Shapes, shards: int, width: int = 4) -> int:
    """FSDP2 splits the first axis, filled up to a multiple of the shards."""
    return width * sum(ceil(s[0] / shards) * shards * prod(s[1:]) for s in found.values())


def of_blocks(found: Shapes) -> Shapes:
    return {name: shape for name, shape in found.items() if name.startswith("blocks.")}


def of_root(found: Shapes) -> Shapes:
    return {name: shape for name, shape in found.items() if not name.startswith("blocks.")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_sends_its_gradients_in_an_all_reduce(ranks: int, counted: Counted) -> None:
    found = counted(ranks, "sharding=ddp")
    share = (ranks - 1) / ranks
    assert found["gradient"] == 2 * share * whole(shapes(asked(ranks)))
    assert found["parameter"] == found["activation"] == 0
    assert set(found["calls"]) == {"all_reduce/gradient"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero1_scatters_gradients_and_gathers_parameters_two_p_in_all(
    ranks: int, counted: Counted
) -> None:
    """Every tensor, and every rank's part of a bucket, is filled up to 256 bytes."""
    found, of = counted(ranks, "sharding=zero1"), shapes(asked(ranks))
    filled = 256 * sum(ceil(4 * prod(shape) / 256) for shape in of.values())
    bucket = 256 * ranks * ceil(filled / ranks / 256)
    assert found["gradient"] == found["parameter"] == (ranks - 1) / ranks * bucket
    assert set(found["calls"]) == {"reduce_scatter/gradient", "all_gather/parameter"}
    assert bucket < 1.2 * whole(of)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sharding", "gathers_of_blocks"), [("fsdp", 2), ("zero2", 1)])
def test_fsdp_gathers_blocks_and_scatters_gradients_padding_included(
    sharding: str, gathers_of_blocks: int, ranks: int, counted: Counted
) -> None:
    found = counted(ranks, f"sharding={sharding}")
    share, of = (ranks - 1) / ranks, shapes(asked(ranks))
    blocks, root = padded(of_blocks(of), ranks), padded(of_root(of), ranks)
    assert blocks + root > whole(of), "the sizes are chosen so that there is padding"
    assert found["parameter"] == share * (gathers_of_blocks * blocks + root)
    assert found["gradient"] == share * (blocks + root)
    assert found["activation"] == 0


def test_blocks_of_one_unit_are_gathered_together(counted: Counted) -> None:
    alone, together = (
        counted(2, "sharding=fsdp", *more) for more in ((), ("sharding.blocks_per_unit=2",))
    )
    gathers, scatters = "all_gather/parameter", "reduce_scatter/gradient"
    assert together["parameter"] == alone["parameter"]
    assert [alone["calls"][kind]["calls"] for kind in (gathers, scatters)] == [5, 3]
    assert [together["calls"][kind]["calls"] for kind in (gathers, scatters)] == [3, 2]


def test_hsdp_adds_an_all_reduce_of_shards_over_the_copies(counted: Counted) -> None:
    found = counted(4, "sharding=hsdp")
    of = shapes(asked(4))
    blocks, root = padded(of_blocks(of), 2), padded(of_root(of), 2)
    assert found["parameter"] == 1 / 2 * (2 * blocks + root)
    scattered, over_copies = 1 / 2 * (blocks + root), 2 * 1 / 2 * (blocks + root) / 2
    assert found["gradient"] == scattered + over_copies


def test_half_parameters_halve_what_is_sent_except_for_norms(counted: Counted) -> None:
    of = shapes(asked(2))
    norms = {name: shape for name, shape in of.items() if "norm" in name}
    others = {name: shape for name, shape in of.items() if "norm" not in name}
    found = counted(2, "precision=O2", "sharding=ddp")
    assert found["gradient"] == whole(norms) + whole(others, width=2)


def test_under_fsdp_masters_are_gathered_half_and_gradients_reduced_whole(counted: Counted) -> None:
    of = shapes(asked(2))
    norms = {name: shape for name, shape in of.items() if "norm" in name}
    others = {name: shape for name, shape in of.items() if "norm" not in name}
    found = counted(2, "precision=O2", "sharding=fsdp")
    gathered = 2 * padded(of_blocks(others), 2, width=2) + padded(of_root(others), 2, width=2)
    assert found["parameter"] == 1 / 2 * (gathered + padded(norms, 2)), "norms are gathered once"
    assert found["gradient"] == 1 / 2 * padded(of, 2)


def test_masters_of_bf16_parameters_are_gathered_in_half_the_bytes_of_autocast(
    counted: Counted,
) -> None:
    whole_width = counted(2, "precision=bf16", "sharding=fsdp")
    half = counted(2, "precision=bf16_masters", "sharding=fsdp")
    assert half["parameter"] == whole_width["parameter"] / 2
    assert half["gradient"] == whole_width["gradient"], "reduced in float32"
    gathers = "all_gather/parameter"
    assert half["calls"][gathers]["calls"] == whole_width["calls"][gathers]["calls"]


def test_accumulation_sends_gradients_once_a_step(counted: Counted) -> None:
    given = ("sharding=ddp", "batch.accumulation_steps=4")
    assert counted(2, *given)["gradient"] == whole(shapes(asked(2)))


def _collectives(world: World) -> dict[str, Any]:
    """Each kind of collective on 24 float32, and one whose sender says what it is for."""
    tensor, other = torch.zeros(24), torch.zeros(24)
    group = dist.group.WORLD
    with counted_bytes() as sent:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        all_gather_single(other, torch.zeros(12))
        reduce_scatter_single(torch.zeros(12), tensor)
        dist.all_to_all_single(other, tensor)
        if world.rank:
            dist.recv(tensor, 0)
        else:
            dist.send(tensor, 1)
        with sent_as("activation"):
            dist.all_reduce(tensor, group=group)
        dist.barrier()
    return sent.by_collective


def test_each_collective_is_counted_by_what_a_rank_sends(tmp_path: Path) -> None:
    sender, receiver = on_ranks(2, _collectives, asked(2), folder=tmp_path)
    both = {
        "all_gather/unattributed": {"calls": 1, "bytes": 48.0},
        "all_reduce/activation": {"calls": 1, "bytes": 96.0},
        "all_reduce/unattributed": {"calls": 1, "bytes": 96.0},
        "all_to_all/unattributed": {"calls": 1, "bytes": 48.0},
        "broadcast/unattributed": {"calls": 1, "bytes": 48.0},
        "reduce_scatter/unattributed": {"calls": 1, "bytes": 48.0},
    }
    assert receiver == both
    assert sender == both | {"send/unattributed": {"calls": 1, "bytes": 96.0}}


def _total(collectives: Collectives) -> float:
    return sum(duration for *_, duration in collectives)


def _with_a_late_rank(world: World) -> Collectives:
    buffers = [torch.zeros(1 << 16) for _ in range(3)]

    def step() -> None:
        for buffer in buffers:
            if world.rank:
                time.sleep(0.4)
            dist.all_reduce(buffer)

    return profile_collectives(step, world.device)


def test_waiting_for_a_late_rank_is_no_transfer(tmp_path: Path) -> None:
    ranks = on_ranks(2, _with_a_late_rank, asked(2), folder=tmp_path)
    assert [len(rank) for rank in ranks] == [3, 3]
    assert _total(ranks[0]) > 800, "the first rank waits 400 ms for each, less where it is late too"
    assert communication_ms(ranks, ["here", "here"]) < 0.3 * _total(ranks[0])


@pytest.mark.parametrize(("ranks", "shortest_ms"), [(2, 0.98), (64, 0.89), (2048, 0.85)])
def test_transfers_are_not_shorter_the_more_ranks_there_are(ranks: int, shortest_ms: float) -> None:
    """Arrivals and ends vary by 0.1 ms, clocks of machines by 5 ms; a transfer takes 1 ms."""
    draws, calls = np.random.default_rng(0), 50
    arrivals = 10.0 * np.arange(calls) + draws.normal(0, 0.1, (ranks, calls))
    ends = arrivals.max(axis=0) + 1.0 + draws.normal(0, 0.1, (ranks, calls))
    machines = [f"machine {rank // 8}" for rank in range(ranks)]
    clocks = np.repeat(draws.normal(0, 5, -(-ranks // 8)), 8)[:ranks, None]
    found = [
        [("gloo:all_reduce", start, duration) for start, duration in zip(*own, strict=True)]
        for own in zip(arrivals + clocks, ends - arrivals, strict=True)
    ]
    transfers = transfers_ms(found, machines)
    assert np.mean(transfers or 0) == pytest.approx(1.0, abs=0.03)
    shortest = (ends - arrivals).min(axis=0).mean()
    assert shortest == pytest.approx(shortest_ms, abs=0.01), "which leaves out waiting too"


def test_a_broadcast_that_is_over_before_its_last_rank_arrives_takes_its_shortest_time() -> None:
    ranks = [[("gloo:broadcast", 0.0, 2.0)], [("gloo:broadcast", 5.0, 0.5)]]
    assert transfers_ms(ranks, ["a", "a"]) == [0.5]


def test_ranks_with_different_collectives_cannot_be_aligned() -> None:
    ranks = [[("gloo:send", 0.0, 2.0)], [("gloo:recv", 0.0, 4.0)]]
    assert communication_ms(ranks, ["a", "b"]) == 3.0
    assert communication_ms([[], []], ["a", "b"]) == 0.0


def _times(world: World) -> dict[str, float]:
    buffer = torch.zeros(1 << 20)
    return {
        "collective": _total(profile_collectives(lambda: dist.all_reduce(buffer), world.device)),
        "quiet": _total(profile_collectives(lambda: buffer.add_(1), world.device)),
    }


def gathers(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook as a user writes it, whose collectives say no purpose."""
    parts = [torch.empty_like(output) for _ in range(2)]
    dist.all_gather(parts, output.detach())
    together = torch.cat(dist_functional.all_gather(output.contiguous()))
    return output + 0 * together.mean()


def beside_plain_collectives(world: World, cells: list[CellSpec]) -> list[list[dict[str, float]]]:
    of_cells = []
    for spec in cells:
        found = []
        for is_hooked in (False, True):
            model = build_model(spec)
            trainer = parallelize(model, spec, world)
            block = next(m for m in trainer.model.modules() if isinstance(m, Block))
            if is_hooked:
                block.register_forward_hook(gathers)
            step = partial(
                trainer.step, iter(2 * my_share(spec, global_batch(spec, 0, world), world))
            )
            step()
            with counted_bytes() as sent:
                step()
            found.append(sent.by_purpose)
        of_cells.append(found)
    return of_cells


def test_what_a_user_sends_without_a_purpose_is_booked_as_no_other(tmp_path: Path) -> None:
    cells = [asked(2, f"sharding={name}") for name in ("ddp", "zero1", "fsdp")]
    for spec, (_, (plain, hooked)) in zip(
        cells, answers(beside_plain_collectives, cells, tmp_path), strict=True
    ):
        sent = hooked.pop("unattributed")
        assert plain.pop("unattributed") == 0
        assert hooked == plain, spec.sharding.name
        tokens = 17 * spec.batch.images_per_step // 2
        assert sent >= 2 * tokens * 36 * 4, "two gathers of a block's output, and one's backward"


def test_time_in_collectives_is_positive(tmp_path: Path) -> None:
    for found in on_ranks(2, _times, asked(2), folder=tmp_path):
        assert found["quiet"] == 0
        assert found["collective"] > 0


def test_one_rank_alone_sends_nothing(tmp_path: Path) -> None:
    [found] = on_ranks(1, _alone, asked(1, "sharding=none"), folder=tmp_path)
    assert found["collective"] == 0


def _alone(world: World) -> dict[str, float]:
    done: list[int] = []
    spent = _total(profile_collectives(lambda: done.append(1), world.device))
    assert not done, "a step would show nothing"
    return {"collective": spent}


def test_without_torchs_tables_nothing_is_counted_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._tools", None)
    with counted_bytes() as found:
        pass
    assert found.by_purpose == {}
    assert "collectives" in found.reason
