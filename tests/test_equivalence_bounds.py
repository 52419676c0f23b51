"""What the proof allows: each bound by numbers made by hand, just within it and just beyond."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.data.cells_and_worlds import world
from tests.training.alone import alone
from vitsweep import equivalence
from vitsweep.equivalence import _Leg, prove
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.training.faults import WrongResultError
from vitsweep.training.optimizer_definitions import ByEquations
from vitsweep.training.reference import PlainStep
from vitsweep.training.twin import Parts, twin_of

FLOAT64 = alone("precision.dtype=float64")
FLOAT32 = alone("precision=fp32")
BFLOAT16 = alone("precision=O1", "precision.half_dtype=bfloat16")
FLOAT16 = alone("precision=O3", "precision.half_dtype=float16")
MASTERS = alone("precision=bf16_masters")
FLOAT8 = alone("precision=fp8", "precision.emulate=true")
U32, U16, UB16 = 2.0**-24, 2.0**-11, 2.0**-8
"""Unit roundoffs of float32, float16 and bfloat16."""


class Rounding(AdamW):
    """AdamW whose state is rounded."""

    def relative_tolerance(self) -> float:
        return 0.01


def leg(spec: CellSpec, **held: Any) -> Any:
    """A comparison before its first step, without the models that it compares."""
    found: Any = object.__new__(_Leg)
    twin = twin_of(spec)
    found._twin, found._plan, found._world = twin, twin.precision.plan(), world()
    found._noise, found._longer, found._shares, found.bit_for_bit = None, {}, [], True
    vars(found).update(held)
    return found


def named(**numbers: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def test_a_comparison_begins_with_nothing_seen() -> None:
    for spec, is_bit_for_bit, is_rounded in ((FLOAT64, True, False), (FLOAT16, False, True)):
        own: Any = _Leg(twin_of(spec), world(), Parts(are_computed=False, are_rounded=False))
        assert (own.worst, own.bit_for_bit) == (0.0, is_bit_for_bit)
        assert (own._squares, own._skipped, own._noise) == ([0.0, 0.0], 0, None)
        assert (own._unrounded is not None) is is_rounded
        assert own.lost_by_storing() is None


def test_roundoff_and_storage_follow_from_the_precision() -> None:
    tf32 = leg(FLOAT32)
    tf32._plan = replace(tf32._plan, tf32=True)
    halved = replace(
        FLOAT32, sharding=cell("sharding=ddp", "sharding.gradient_dtype=bfloat16").sharding
    )
    for found, is_exact, own, stored, rounds in (
        (leg(FLOAT32), False, 16 * U32, torch.float32, False),
        (tf32, False, 2 * U16, torch.float32, False),
        (leg(BFLOAT16), False, 2 * UB16, torch.float32, False),
        (leg(FLOAT16), False, 2 * U16, torch.float16, True),
        (leg(MASTERS), False, 2 * UB16, torch.float32, False),
        (leg(FLOAT8), False, 0.4, torch.float32, False),
        (leg(halved), False, 2 * UB16, torch.float32, False),
    ):  # fmt: skip
        assert found._is_exact is is_exact
        assert found._own_rounding == own
        assert found._stored_dtype == stored
        assert found._rounds is rounds
    assert leg(FLOAT64)._is_exact
    assert not leg(replace(FLOAT16, optimizer=alone("optimizer=muon").optimizer))._rounds


def test_an_update_may_be_rounded_as_it_is_stored() -> None:
    rounding = Rounding(**vars(FLOAT32.optimizer))
    for spec, relative, stored in (
        (FLOAT64, 1e-8, 2.0**-52),
        (FLOAT32, 1e-4, 2 * U32),
        (MASTERS, 1e-4, 2 * U32),
        (FLOAT16, 4 * U16, U16 / 2),
    ):
        assert leg(spec)._update_rounding == (relative, stored)
        assert leg(replace(spec, optimizer=rounding))._update_rounding == (0.15, stored)


def test_which_equations_an_update_is_compared_with() -> None:
    muon = replace(FLOAT16, optimizer=alone("optimizer=muon").optimizer)
    plain = type("Plain", (), {"model": torch.nn.Linear(2, 2)})()
    for spec, kinds in (
        (FLOAT32, ["ByEquations"]),
        (FLOAT16, ["ByEquations", "PlainImplementation"]),
        (muon, ["PlainImplementation"]),
    ):
        updates = leg(spec, _plain=plain)._definitions()
        assert [type(each).__name__ for each in updates] == kinds


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [(FLOAT64, 1e-8), (FLOAT32, 1e-5), (BFLOAT16, 4 * UB16), (FLOAT8, 0.1)],
    ids=["float64", "float32", "bfloat16", "float8"],
)
def test_a_loss_may_differ_by_its_rounding(spec: CellSpec, allowed: float) -> None:
    own = leg(spec)
    for wanted in (2.0, -0.5):
        for sign in (1, -1):
            assert not own._loss_apart(wanted * (1 + sign * 0.99 * allowed), wanted)
            assert own._loss_apart(wanted * (1 + sign * 1.01 * allowed), wanted)
    assert own._loss_apart(float("nan"), 1.0)


def test_gradients_in_float64_are_equal_but_for_the_order_of_sums() -> None:
    wanted = named(
        a=[3.0, 4.0], b=[0.01, 0.0]
    )  # typical: sqrt((25 + 0.0001) / 2), a hundredth of it
    least = 0.01 * (25.0001 / 2) ** 0.5
    step = PlainStep(torch.tensor(1.0), wanted, {})
    own = leg(FLOAT64)
    assert not own._gradients_apart(wanted, step, None)
    assert own.bit_for_bit
    for name, bound in (("a", 5e-8), ("b", 1e-8 * least)):
        for share, is_told in ((0.99, False), (1.01, True)):
            own = leg(FLOAT64)
            found = wanted | {name: wanted[name] + torch.tensor([0.0, share * bound]).double()}
            assert bool(own._gradients_apart(found, step, None)) is is_told, (name, share)
            assert not own.bit_for_bit
            assert (own._shares, own._longer) == ([], {})


def test_gradients_with_rounding_may_differ_by_twice_the_noise_and_their_own_rounding() -> None:
    wanted = named(a=[[3.0, 4.0]], b=[1.2, 1.6])
    typical = 14.5**0.5
    noisy = wanted | {"a": wanted["a"] + torch.tensor([[0.0, 0.01]]).double()}
    step, rounded = (PlainStep(torch.tensor(1.0), each, {}) for each in (wanted, noisy))
    rows = 4 * 17  # images and their tokens
    bounds = {
        "a": 2 * 0.01 + 1e-6 * typical + 16 * U32 * 5,
        "b": 1e-6 * typical + (16 * U32 + rows * U32 / 2) * 2,
    }
    for name, bound in bounds.items():
        for share, is_told in ((0.98, False), (1.02, True)):
            own = leg(FLOAT32)
            along = wanted[name] / wanted[name].norm()
            found = wanted | {name: wanted[name] + share * bound * along}
            assert bool(own._gradients_apart(found, step, rounded)) is is_told, (name, share)
            assert own.bit_for_bit
            assert sum(own._shares) == pytest.approx(share, rel=1e-3)
            lengths = {"a": 0.0, "b": 0.0} | {name: share * bound / float(wanted[name].norm())}
            assert {n: v for n, [v] in own._longer.items()} == pytest.approx(lengths, abs=1e-12)
    assert not own._gradients_apart(wanted, step, None), "the noise of the first step is kept"
    assert [len(shares) for shares in own._longer.values()] == [2, 2]


def test_gradients_of_the_same_order_are_closer_than_their_bounds() -> None:
    shares = [0.06, 0.02]  # root mean square: 0.0447
    assert not leg(BFLOAT16, _shares=shares)._orders_apart()
    far = [0.08, 0.02]  # 0.0583
    assert leg(BFLOAT16, _shares=far)._orders_apart()
    assert leg(MASTERS, _shares=far)._orders_apart()
    assert not leg(BFLOAT16, _shares=far, bit_for_bit=False)._orders_apart()
    assert not leg(BFLOAT16, _shares=[])._orders_apart()
    assert not leg(FLOAT8, _shares=far)._orders_apart()
    two = ("resources.ranks_per_node=2",)
    for words, is_told in (
        (["sharding=fsdp", "precision=bf16_masters"], False),
        (["sharding=fsdp", "precision=bf16"], True),
        (["sharding=ddp", "precision=bf16_masters"], True),
        (["sharding=ddp", "sharding.gradient_dtype=bfloat16"], False),
        (["compilation=compile_blocks"], False),
    ):
        own = leg(cell(*two, *words), _shares=far)
        assert bool(own._orders_apart()) is is_told, words
    on_gpu = leg(BFLOAT16, _shares=far)
    on_gpu._world = replace(on_gpu._world, device=torch.device("meta"))
    assert not on_gpu._orders_apart()


def test_lengths_of_gradients_agree_over_all_steps() -> None:
    """Mean lengths of 0.01 and 0: their root mean square is 0.00707, and few tensors may be off by more."""
    for spec, least in ((FLOAT32, 1e-5), (BFLOAT16, UB16)):
        allowed = least * (1 + 8 / 2)
        for share, is_told in ((0.99, False), (1.01, True)):
            mean = share * allowed * 2**0.5
            longer = {"a": [0.5 * mean, 1.5 * mean], "b": [mean, -mean]}
            assert bool(leg(spec, _longer=longer)._lengths_apart()) is is_told
    assert not leg(FLOAT32)._lengths_apart()


def test_digits_of_half_precision_are_looked_for_in_float32_alone() -> None:
    full = torch.rand(64, generator=torch.Generator().manual_seed(0))
    wanted, found = {"a": full}, {"a": full.bfloat16().float()}
    sent = cell("sharding=ddp", "sharding.gradient_dtype=bfloat16")
    for spec, is_told in ((FLOAT32, True), (FLOAT16, False), (sent, False)):
        assert bool(leg(spec)._digits_lost(found, wanted)) is is_told


def test_an_update_is_compared_with_the_equations() -> None:
    sgd = replace(
        FLOAT32, optimizer=alone("optimizer=sgd_loop", "optimizer.learning_rate=0.5").optimizer
    )
    before, gradients = named(a=[1.0, 0.0], b=[2.0, 2.0]), named(a=[0.0, 2.0], b=[1.0, 1.0])
    exact = ByEquations(sgd.optimizer, torch.float64)(before, gradients)
    moved = float((exact["a"] - before["a"]).norm())
    bound = 1e-4 * moved + 2 * U32 * float(exact["a"].norm())

    def own() -> Any:
        updates = [ByEquations(sgd.optimizer, torch.float64)]
        given = {"_trained": {"a", "b"}, "_updates": updates, "_unrounded": None}
        return leg(sgd, **given, _squares=[0.0, 0.0])

    assert not own()._update_apart(before, exact, gradients)
    for share, is_told in ((0.99, False), (1.01, True)):
        held = exact | {"a": exact["a"] + torch.tensor([0.0, -share * bound]).double()}
        assert bool(own()._update_apart(before, held, gradients)) is is_told
    fixed = exact | {"b": before["b"]}
    assert own()._update_apart(before, fixed, gradients), "a weight that was trained stays"
    frozen = own()
    frozen._trained = {"a"}
    assert not frozen._update_apart(before, exact | {"b": before["b"]}, gradients)


def test_the_nearest_of_two_definitions_counts_for_each_tensor() -> None:
    before, gradients = named(a=[1.0], b=[1.0]), named(a=[1.0], b=[1.0])
    low, high = named(a=[0.5], b=[0.5]), named(a=[0.7], b=[0.7])
    for updates in ([low, high], [high, low]):
        own = leg(FLOAT32, _trained={"a", "b"}, _unrounded=None)
        own._updates = [lambda weights, used, given=given: given for given in updates]
        assert not own._update_apart(before, named(a=[0.5], b=[0.7]), gradients)
        assert own._update_apart(before, named(a=[0.5], b=[0.8]), gradients)


def test_what_storing_loses_is_relative_to_all_updates() -> None:
    before, ideal = named(a=[1.0, 1.0], b=[1.0]), named(a=[1.0, 5.0], b=[4.0])
    own = leg(FLOAT16, _trained={"a", "b"}, _squares=[0.0, 0.0])
    assert own.lost_by_storing() is None
    own._updates = [lambda weights, used: ideal]
    own._unrounded = lambda weights, used: ideal
    own._update_apart(before, named(a=[1.0, 4.0], b=[4.0]), named(a=[1.0, 1.0], b=[1.0]))
    assert own._squares == [1.0, 25.0]
    assert own.lost_by_storing() == 0.2


def test_averages_follow_their_equation() -> None:
    average, before, held = named(a=4.0), named(a=2.0), named(a=1.0)

    class Scaler:
        skipped: ClassVar[list[int]] = []

    def after(*words: str, step: int = 0, skipped: int = 0, known: int = 0) -> float:
        own = leg(alone("averaging=ema", *words), _skipped=known, _trainer=Scaler())
        own._trainer.skipped = [0] * skipped
        found = float(own._averaged(average, before, held, step)["a"])
        assert own._skipped == skipped
        return found

    late = ("averaging.warmup=false", "averaging.decay=0.5")
    assert after(*late) == 2.5
    assert after(*late, skipped=1) == 2.5, "the step itself"
    assert after(*late, skipped=3) == 1.75, "4, 3 and 2.5 by `before`, then by `held`"
    assert after(*late, skipped=3, known=2) == 2.5
    assert after("averaging.decay=0.15") == pytest.approx(0.1 * 4 + 0.9)
    assert after("averaging.decay=0.15", step=1) == pytest.approx(0.15 * 4 + 0.85)
    assert after("averaging.decay=0.9", step=1) == pytest.approx(2 / 11 * 4 + 9 / 11)
    every = ("averaging.decay=0.9", "averaging.every=2")
    assert [after(*every, step=step) for step in (0, 2)] == [4.0, 4.0]
    assert after(*every, step=1) == pytest.approx(0.1 * 4 + 0.9)
    assert after(*every, step=3) == pytest.approx(2 / 11 * 4 + 9 / 11)
    assert (
        leg(FLOAT32, _skipped=0, _trainer=Scaler())._averaged(average, before, held, 0) == average
    )


def test_weights_that_are_read_equal_those_that_are_updated_but_for_one_rounding() -> None:
    wanted = named(a=[3.0, 4.0])
    for spec, bound in ((FLOAT16, 1.01 * U16 * 5), (MASTERS, 1.01 * UB16 * 5)):
        for share, is_told in ((0.99, False), (1.01, True)):
            found = named(a=[3.0, 4.0 + share * bound])
            assert bool(leg(spec)._weights_apart("weight", found, wanted)) is is_told
    for spec in (FLOAT32, BFLOAT16):
        assert not leg(spec)._weights_apart("weight", wanted, wanted)
        assert leg(spec)._weights_apart("weight", named(a=[3.0, 4.0 + 1e-12]), wanted)


def test_buffers_of_the_first_replica_are_compared() -> None:
    wanted = named(mean=[3.0, 4.0])
    for spec, allowed in ((FLOAT64, 1e-8), (FLOAT32, 8 * U32)):
        for share, is_told in ((0.99, False), (1.01, True)):
            there = named(mean=[3.0, 4.0 + share * allowed * 5], other=[1.0])
            own = leg(spec, _buffers=lambda there=there: there)
            assert bool(own._buffers_apart(wanted)) is is_told
            assert not own._buffers_apart({})
            own._world = world(1, replicate=2)
            assert not own._buffers_apart(wanted)


def test_the_average_that_is_read_is_compared_with_its_equation() -> None:
    """Allowed are a share of how far the average lies from the weights, and roundings of its numbers."""
    held, wanted = named(a=[3.0, 4.0]), named(a=[3.0, 5.0])
    bound = 1e-4 * 1 + 4 * 2 * U32 * 34**0.5

    class Trainer:
        def averaged_weights(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

    for share, is_told in ((0.99, False), (1.01, True)):
        found = named(a=[3.0, 5.0 + share * bound])
        own = leg(alone("averaging=ema"), _trainer=Trainer(), _held=lambda found=found: found)
        assert bool(own._averages_apart(wanted, held)) is is_told
        assert not leg(FLOAT32)._averages_apart(wanted, held)


def test_an_optimizer_is_proved_on_few_and_on_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (0, 1):
        told = iter(["wrong" * (place == fault) for place in range(2)])
        monkeypatch.setattr(equivalence, "series_apart", lambda *_, told=told: next(told))
        with pytest.raises(WrongResultError):
            prove(FLOAT32, world())


def test_a_module_in_half_precision_is_compared_with_itself_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, noisy = named(a=[3.0, 4.0]), named(a=[3.0, 4.01])
    bound = 6 * 0.01 + 2 * UB16 * 5
    module = object.__new__(ModuleSpec)

    def step_of(gradients: dict[str, Tensor]) -> PlainStep:
        return PlainStep(torch.tensor(1.0), gradients, {})

    class Plain:
        def __init__(self, spec: CellSpec, *_: object) -> None:
            assert spec.precision.plan().param_dtype == "float64"

        def step(self, *_: object) -> PlainStep:
            return step_of(wanted)

    def is_told(spec: CellSpec, share: float, **changed: Any) -> bool:
        found = named(a=[3.0, 4.0 - share * bound])
        steps = [step_of({"a": found["a"] + each["a"] - wanted["a"]}) for each in (wanted, noisy)]
        parts = Parts(are_computed=False, are_rounded=False)
        own = leg(spec, _references=lambda *_: steps, _buffers=dict, parts=parts)
        own._twin = replace(own._twin, **changed)
        return bool(own._half_apart({}))

    monkeypatch.setattr(equivalence, "PlainModel", Plain)
    monkeypatch.setattr(equivalence, "global_batch", lambda *_: None)
    monkeypatch.setattr(ModuleSpec, "norms_over_batch", False)
    for share in (0.98, 1.02):
        assert is_told(BFLOAT16, share, model=module) is (share > 1)
    assert is_told(MASTERS, 2, model=module)
    assert not is_told(BFLOAT16, 2)
    assert not is_told(FLOAT32, 2, model=module)
    assert not is_told(FLOAT16, 2, model=module)
