"""Buckets, units and their settings in one process, by sizes with one answer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import TINY, cell, entry
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.techniques.sharding import fsdp, zero1_buckets
from vitsweep.techniques.sharding.fsdp import Hsdp, _gather_dtype, _placement, _without_views
from vitsweep.techniques.sharding.zero1_buckets import MIB, Bucket, ShardedReplica, _in_buckets


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found, start = [], 1
    for size in sizes:
        found.append(nn.Parameter(torch.arange(start, start + size).to(dtype)))
        start += size
    return found


def test_a_rank_updates_its_part_of_a_bucket() -> None:
    """100, 30 and 70 numbers are filled up to 128, 64 and 128: 320, of which each of two ranks has 192."""
    for rank, pieces, firsts in (
        (0, {0: (1, 100), 1: (101, 130)}, {0: 0, 1: 0}),
        (1, {2: (131, 200)}, {2: 0}),
    ):
        held = parameters(100, 30, 70)
        place = {parameter: index for index, parameter in enumerate(held)}
        bucket = Bucket(held, group(rank, 2))
        assert len(bucket._values) == 384
        found = {place[p]: piece for p, piece in bucket.pieces.items()}
        assert {i: (int(p[0]), int(p[-1])) for i, p in found.items()} == pieces
        assert {place[p]: bucket.first_number(p) for p in bucket.pieces} == firsts
        assert [int(p[0]) for p in held] == [1, 101, 131]
        assert all(p.data_ptr() >= bucket._values.data_ptr() for p in held)


def test_a_piece_may_begin_and_end_inside_of_a_parameter() -> None:
    [held] = parameters(200)  # filled up to 256, and 128 on each of two ranks
    first, second = (Bucket([held], group(rank, 2)) for rank in range(2))
    assert [int(n) for n in (first.pieces[held][0], first.pieces[held][-1])] == [1, 128]
    assert [int(n) for n in (second.pieces[held][0], second.pieces[held][-1])] == [129, 200]
    assert (first.first_number(held), second.first_number(held)) == (0, 128)


def test_one_rank_alone_has_its_gradients_where_they_are() -> None:
    held = parameters(3, 5)
    bucket = Bucket(held, None)
    for parameter in held:
        parameter.grad = 2 * parameter.detach()
        bucket.keep(parameter)
        bucket.keep(parameter)
    assert held[1].grad is not None
    held[1].grad += 1
    assert not bucket.complete_with(held[0])
    assert bucket.complete_with(held[1])
    bucket.send()
    bucket.receive(set())
    assert bucket.pieces[held[0]].grad.tolist() == [2, 4, 6]  # type: ignore[union-attr]
    assert bucket.pieces[held[1]].grad.tolist() == [9, 11, 13, 15, 17]  # type: ignore[union-attr]
    assert not bucket.complete_with(held[0]), "the next step begins anew"
    bucket.receive({held[1]})
    assert bucket.pieces[held[1]].grad is None
    assert bucket.start_gather() is None
    assert all(parameter.grad is None for parameter in held)
    whole = bucket.whole(held[1], {held[1]: torch.full((5,), 3.0), held[0]: None})
    assert (whole.tolist(), whole.dtype) == ([3.0] * 5, torch.float32)
    held[0].grad = None
    bucket.send()
    assert not bucket._views[held[0]].any(), "a gradient that is missing counts as zero"


def test_gradients_are_exchanged_in_another_dtype_and_widened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def scatter(whole: torch.Tensor, own: torch.Tensor, ranks: Any) -> Any:
        sent.append((whole.dtype, len(whole), len(own)))
        own.copy_(whole[: len(own)] / 2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(zero1_buckets, "start_mean_scatter", scatter)
    for dtype, kept in ((None, 1 + 2.0**-10), (torch.bfloat16, 1.0)):
        held = parameters(64, 64)
        bucket = Bucket(held, group(0, 2), dtype)
        for parameter in held:
            parameter.grad = torch.full((64,), 2 + 2.0**-9)
            bucket.keep(parameter)
        bucket.send()
        bucket.send()
        bucket.receive(set())
        gradient = bucket.pieces[held[0]].grad
        assert gradient is not None
        assert (gradient.dtype, float(gradient[0]), list(bucket.pieces)) == (
            torch.float32,
            kept,
            [held[0]],
        )
    assert sent == [(torch.float32, 128, 64), (torch.bfloat16, 128, 64)]


def test_buckets_begin_with_the_last_layers_and_hold_one_dtype() -> None:
    layers = [nn.Linear(256, 1024, bias=False) for _ in range(5)]  # a MiB each
    layers[1].half()
    layers[3].weight.requires_grad_(False)
    found = list(_in_buckets(nn.Sequential(*layers), 2 * MIB))
    places = [[next(i for i, x in enumerate(layers) if x.weight is p) for p in b] for b in found]
    assert places == [[4, 2], [1], [0]]
    assert len(list(_in_buckets(nn.Sequential(*layers), 1 * MIB))) == 4


def test_buckets_are_sent_in_their_order_on_the_last_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    replica = ShardedReplica(model, None, 8 / MIB)
    assert len(replica.buckets) == 2
    sent: list[int] = []
    for index, bucket in enumerate(replica.buckets):
        bucket.send = lambda index=index: sent.append(index)  # type: ignore[method-assign]
    last, first = (bucket.parameters[0] for bucket in replica.buckets)
    for parameter in (first, last):
        parameter.grad = torch.ones_like(parameter)
    replica._on_gradient(1, first)
    assert sent == []
    with replica.exchanging(True):
        replica._on_gradient(1, first)
        assert sent == [], "the bucket before is not ready"
        replica._on_gradient(0, last)
        assert sent == [0, 1]
    with replica.exchanging(False):
        replica._on_gradient(0, last)
    assert sent == [0, 1]
    first.grad = None
    assert replica._without_gradient() == {first}


def test_copies_of_the_state_lie_on_nodes_or_on_halves() -> None:
    for nodes, per_node, replicas, shards in (
        (2, 8, 16, 8), (1, 4, 4, 2), (1, 6, 6, 3), (1, 5, 5, 1), (1, 9, 9, 3), (1, 1, 1, 1),
    ):  # fmt: skip
        resources = {"nodes": nodes, "ranks_per_node": per_node}
        assert Hsdp.default_shards(replicas, resources) == shards


def test_groups_of_shards_must_divide_them_and_copies_be_several() -> None:
    def refused(*words: str, ranks: int = 4) -> bool:
        return bool(entry(*TINY, f"resources.ranks_per_node={ranks}", *words).reasons)

    after = "sharding.reshard_after_forward"
    for ranks, degree, is_refused in (
        (4, 2, False),
        (4, 3, True),
        (4, 4, True),
        (8, 4, False),
        (8, 3, True),
    ):
        assert refused("sharding=fsdp", f"{after}={degree}", ranks=ranks) is is_refused, (
            ranks,
            degree,
        )
    assert not refused("sharding=fsdp", f"{after}=true")
    assert not refused("sharding=fsdp")
    assert refused("sharding=fsdp", "mesh.shard=2")
    assert not refused("sharding=hsdp", "mesh.shard=2")
    assert refused("sharding=hsdp", "mesh.shard=4")
    assert refused("sharding=hsdp", "mesh.shard=1")


def test_half_gradients_loosen_the_tolerance_of_losses() -> None:
    two = "resources.ranks_per_node=2"
    for name in ("ddp", "fsdp", "zero1"):
        plain, half = (
            cell(f"sharding={name}", two, *more).sharding.relative_tolerance()
            for more in ((), ("sharding.gradient_dtype=bfloat16",))
        )
        assert (plain, half > 1e-4) == (0.0, True)


def test_what_a_model_returns_is_copied_where_it_is_a_view() -> None:
    base = torch.zeros(4, 3)
    view, made = base[:, 0], base + 1
    found = _without_views(nn.Identity(), (), {"view": view, "made": made, "number": 3})
    assert found["view"]._base is None
    assert found["made"] is made
    assert found["number"] == 3


def test_masters_are_gathered_in_half_and_embeddings_split_along_their_width() -> None:
    assert (
        _gather_dtype(PrecisionPlan(param_dtype="bfloat16", master_weights=True)) == torch.bfloat16
    )
    assert _gather_dtype(PrecisionPlan(param_dtype="bfloat16")) is None
    for shape, axis in (((1, 5, 8), 2), ((1, 5, 6), None), ((2, 5, 8), None), ((5, 8), None)):
        found = _placement(nn.Parameter(torch.zeros(shape)), 4)
        assert (found.dim if found else None) == axis


def test_an_older_torch_leaves_shards_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    moved: list[Any] = []
    monkeypatch.setattr(fsdp, "is_older_than", lambda version: True)
    monkeypatch.setattr(FSDPParam, "reset_sharded_param", moved.append)
    for _ in range(2):  # the second time it is done already
        fsdp._keep_shards_in_place()
    memory, other = torch.zeros(4), torch.zeros(4)

    def own(now: torch.Tensor, *, is_replaced: bool = False) -> Any:
        here = SimpleNamespace(_local_tensor=now)
        place = SimpleNamespace(module=SimpleNamespace(weight=here), param_name="weight")
        known = SimpleNamespace() if is_replaced else here
        return SimpleNamespace(_module_info=place, sharded_param=known, _sharded_param_data=memory)

    for each, is_moved in (
        (own(memory[1:]), False),
        (own(other), True),
        (own(memory, is_replaced=True), True),
        (own(memory.to("meta")), True),
    ):
        moved.clear()
        FSDPParam.reset_sharded_param(each)
        assert moved == [each] * is_moved
