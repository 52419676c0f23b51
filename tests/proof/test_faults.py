"""How far tensors lie apart, by numbers made by hand, and which choices a difference points to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.training.alone import alone
from vitsweep.proof.checks import beyond_half, digits_lost, longer
from vitsweep.proof.faults import (
    ALONE,
    BACKWARD,
    EITHER,
    FORWARD,
    MODULE,
    START,
    UPDATE,
    Place,
    WrongResultError,
    agree,
    furthest,
    minus,
    norms_of,
    typical_norm,
    wide,
)


def named(**numbers: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in numbers.items()}


def test_norms_and_differences_are_in_float64() -> None:
    assert norms_of({}) == {}
    assert norms_of(named(a=[3.0, 4.0], b=[[2.0]], c=[3j, 4])) == {"a": 5.0, "b": 2.0, "c": 5.0}
    assert wide(torch.tensor(1.0)).dtype == torch.float64
    assert wide(torch.tensor(1j)).dtype == torch.complex128
    found = minus(named(a=[[1.0, 5.0]], c=[9.0]), named(a=[2.0, 3.0], b=[7.0]))
    assert {n: t.tolist() for n, t in found.items()} == {"a": [-1.0, 2.0], "b": [-7.0]}
    assert found["a"].dtype == torch.float64
    assert typical_norm({"a": 1.0, "b": 7.0}) == 5.0


def test_digits_beyond_half_precision_are_counted_of_many_numbers_alone() -> None:
    half, full = torch.tensor(1 + 2.0**-10), torch.tensor(1 + 2.0**-11)
    assert beyond_half(half.repeat(16)) == 0.0
    assert beyond_half(full.repeat(15)) == 0.0, "few have them by chance"
    assert beyond_half(full.repeat(16)) == 1.0
    assert beyond_half(torch.cat([full.repeat(4), half.repeat(12)])) == 0.25
    assert beyond_half(torch.tensor(1 + 2.0**-23).repeat(16)) == 1.0
    assert beyond_half((-full).bfloat16().repeat(16)) == 0.0


def test_digits_are_lost_where_none_is_left_of_more_than_half() -> None:
    half, full = torch.tensor(1.5), torch.tensor(1 + 2.0**-20)
    rounded, whole = half.repeat(16), full.repeat(16)
    mostly, some = torch.cat([whole[:9], rounded[:7]]), torch.cat([whole[:8], rounded[:8]])
    for found, wanted, is_lost in (
        ({"a": rounded}, {"a": whole}, True),
        ({"a": rounded}, {"a": mostly}, True),
        ({"a": rounded}, {"a": some}, False),
        ({"a": some}, {"a": whole}, False),
        ({"a": whole}, {"a": whole}, False),
        ({"a": rounded}, {"a": rounded}, False),
        ({}, {"a": whole}, False),
    ):
        assert bool(digits_lost(found, wanted)) is is_lost
    both = digits_lost({"a": whole, "b": rounded}, {"a": whole, "b": whole})
    assert "`b`" in both


def test_a_gradient_is_longer_by_its_share_along_the_reference() -> None:
    wanted = named(a=[3.0, 4.0], b=[0.1, 0.0], small=[0.01, 0.0])
    norms = norms_of(wanted)  # typical: 2.89; a hundredth of it lies between b's and the last
    found = named(a=[3.3, 4.4], b=[0.1, 5.0], small=[1.0, 0.0])
    assert longer(found, wanted, norms) == pytest.approx({"a": 0.1, "b": 0.0}, abs=1e-7)
    assert longer(named(b=[0.05, 0.0]), wanted, norms) == pytest.approx({"b": -0.5})
    assert longer({}, wanted, norms) == {}


def test_the_tensor_that_is_furthest_outside_is_named() -> None:
    norms = {"a": 10.0, "b": 4.0, "c": 0.0}
    bounds = {"a": 1.0, "b": 0.1, "c": 0.0}
    assert furthest("x", {"a": 1.0, "b": 0.1, "c": 0.0}, bounds, norms) == ""
    told = furthest("x", {"a": 5.0, "b": 1.0, "c": 0.0}, bounds, norms)
    assert {"`b`", "0.25", "0.025"} <= set(told.split()), "ten times its bound, not five times"
    assert "`a`" in furthest("x", {"a": 1.5, "b": 0.1}, bounds, norms)
    assert "`b`" in furthest("x", {"b": float("nan")}, bounds, norms)
    told = furthest("x", {"a": 5.0, "b": 1.0, "c": 3.0}, bounds, norms)
    assert {"`c`", "3", "0"} <= set(told.split()), "no difference is allowed where all are zero"


def test_the_first_fault_in_the_order_of_a_step_is_raised() -> None:
    agree([(START, ""), (UPDATE, "")], "here", alone())
    with pytest.raises(WrongResultError) as error:
        agree([(START, ""), (FORWARD, "loss"), (UPDATE, "update")], "in step 3", alone())
    assert {"loss", "3", FORWARD.words.split()[-2]} <= set(str(error.value).split())
    assert "update" not in str(error.value)
    assert "(rank 0)" in str(error.value)


def suspects(place: Place, *words: str, **changed: Any) -> set[str]:
    spec = replace(cell(*words), **changed)
    with pytest.raises(WrongResultError) as error:
        agree([(place, "loss")], "now", spec)
    return set(str(error.value).split("`")[1::2])


def test_choices_are_suspects_where_they_touch_what_differs() -> None:
    one = ("resources.ranks_per_node=1", "sharding=none")
    sgd = "optimizer=sgd_foreach"
    ddp, o1 = "sharding=ddp", "precision=O1"
    two = ("resources.ranks_per_node=2", ddp)
    assert suspects(ALONE, *one) == {"optimizer=adamw_loop"}
    assert suspects(ALONE, *one, sgd) == {sgd}
    assert suspects(MODULE, *one, o1, "memory=recompute_blocks") == {o1}
    assert suspects(UPDATE, *one) == {"optimizer=adamw_loop"}
    assert suspects(FORWARD, *one) == set()
    assert suspects(FORWARD, *one, "precision=fp32") == set()
    assert suspects(FORWARD, *one, "attention=sdpa_math", sgd) == {"attention=sdpa_math"}
    assert suspects(BACKWARD, *two, o1) == {ddp, o1}
    assert suspects(BACKWARD, *two, "optimizer.clip_norm=0.5") == {ddp, "optimizer.clip_norm=0.5"}
    assert suspects(EITHER, *two, "optimizer.clip_norm=0.5") == {ddp, "optimizer.clip_norm=0.5"}
    assert suspects(FORWARD, *one, "optimizer.clip_norm=0.5") == set()
    exact = cell(*one, "precision.dtype=float64").precision
    assert suspects(FORWARD, *one, precision=exact) == set(), "the exact twin's own"
