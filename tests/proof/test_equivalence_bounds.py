"""What the proof allows: each bound by numbers made by hand, just within it and just beyond."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from tests.cells import cell
from tests.data.cells_and_worlds import world
from tests.training.alone import alone
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.proof import checks, prove
from vitsweep.proof.checks import Bounds, Gradients, Updates
from vitsweep.proof.evidence import Evidence, Reference, TrainedTwin
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.optimizer_definitions import ByEquations, definitions_of
from vitsweep.proof.reference import PlainStep
from vitsweep.proof.twin import global_batch, twin_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.training import update

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


def bounds(spec: CellSpec, **changed: Any) -> Bounds:
    """What rounding explains in the cell's twin, on one rank."""
    found = Bounds(twin_of(spec), world())
    vars(found).update(changed)
    return found


NOTHING = Evidence()


def named(**numbers: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def test_losses_that_are_zero_are_equal_and_no_other_is_equal_to_them() -> None:
    """As of a surrogate that has a gradient alone, `(x - x.detach()).sum()`."""
    assert checks.loss(NOTHING, NOTHING, bounds(FLOAT64)) == ""
    for other in (1e-30, float("nan")):
        assert "loss" in checks.loss(Evidence(loss=other), NOTHING, bounds(FLOAT64))
    none = Evidence(gradients=named(a=[0.0]), noise={"a": 0.0})
    for spec in (FLOAT64, FLOAT32):
        assert Gradients(False)(none, none, bounds(spec)) == ""


def test_roundoff_and_storage_follow_from_the_precision() -> None:
    tf32 = replace(FLOAT32, precision=alone("precision.tf32=true").precision)
    halved = replace(
        FLOAT32, sharding=cell("sharding=ddp", "sharding.gradient_dtype=bfloat16").sharding
    )
    for spec, own, stored in (
        (FLOAT32, 16 * U32, torch.float32),
        (tf32, 2 * U16, torch.float32),
        (BFLOAT16, 2 * UB16, torch.float32),
        (FLOAT16, 2 * U16, torch.float16),
        (MASTERS, 2 * UB16, torch.float32),
        (FLOAT8, 0.4, torch.float32),
        (halved, 2 * UB16, torch.float32),
    ):
        found = bounds(spec)
        assert not found.is_exact
        assert found.own_rounding == own
        assert found.stored == stored
    assert bounds(FLOAT64).is_exact


def test_an_update_may_be_rounded_as_it_is_stored() -> None:
    rounding = Rounding(**vars(FLOAT32.optimizer))
    moved, weights = named(a=[2.0]), named(a=[5.0])
    for spec, relative, stored in (
        (FLOAT64, 1e-8, 2.0**-52),
        (FLOAT32, 1e-4, 2 * U32),
        (MASTERS, 1e-4, 2 * U32),
        (FLOAT16, 4 * U16, U16 / 2),
    ):
        own = bounds(spec)
        assert own.update_rounding == (relative, stored)
        assert own.update(moved, weights) == {"a": relative * 2 + stored * 5}
        assert own.update(moved, weights, 4) == {"a": relative * 2 + 4 * stored * 5}
        assert bounds(replace(spec, optimizer=rounding)).update_rounding == (0.15, stored)


def test_which_equations_an_update_is_compared_with() -> None:
    muon = alone("optimizer=muon").optimizer
    for optimizer, stored, kinds in (
        (FLOAT32.optimizer, torch.float32, ["ByEquations"]),
        (FLOAT32.optimizer, torch.float16, ["ByEquations", "PlainImplementation"]),
        (muon, torch.float64, ["ByEquations"]),
        (muon, torch.float16, ["PlainImplementation"]),
    ):
        found = definitions_of(optimizer, stored, set())
        assert [type(each).__name__ for each in found] == kinds


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [(FLOAT64, 1e-8), (FLOAT32, 1e-5), (BFLOAT16, 4 * UB16), (FLOAT8, 0.1)],
    ids=["float64", "float32", "bfloat16", "float8"],
)
def test_a_loss_may_differ_by_its_rounding(spec: CellSpec, allowed: float) -> None:
    own = bounds(spec)

    def is_told(loss: float, wanted: float) -> bool:
        return bool(checks.loss(Evidence(loss=loss), Evidence(loss=wanted), own))

    for wanted in (2.0, -0.5):
        for sign in (1, -1):
            assert not is_told(wanted * (1 + sign * 0.99 * allowed), wanted)
            assert is_told(wanted * (1 + sign * 1.01 * allowed), wanted)
    assert is_told(float("nan"), 1.0)


def test_gradients_in_float64_are_equal_but_for_the_order_of_sums() -> None:
    wanted = named(
        a=[3.0, 4.0], b=[0.01, 0.0]
    )  # typical: sqrt((25 + 0.0001) / 2), a hundredth of it
    least = 0.01 * (25.0001 / 2) ** 0.5
    expected, exact = Evidence(gradients=wanted), bounds(FLOAT64)
    own = Gradients(bit_for_bit=True)
    assert not own(Evidence(gradients=wanted), expected, exact)
    assert own.bit_for_bit
    for name, bound in (("a", 5e-8), ("b", 1e-8 * least)):
        for share, is_told in ((0.99, False), (1.01, True)):
            own = Gradients(bit_for_bit=True)
            found = wanted | {name: wanted[name] + torch.tensor([0.0, share * bound]).double()}
            assert bool(own(Evidence(gradients=found), expected, exact)) is is_told, (name, share)
            assert not own.bit_for_bit
            assert (own._shares, own._longer) == ([], {})


def test_gradients_with_rounding_may_differ_by_twice_the_noise_and_their_own_rounding() -> None:
    wanted = named(a=[[3.0, 4.0]], b=[1.2, 1.6])
    typical = 14.5**0.5
    first = Evidence(gradients=wanted, noise={"a": 0.01, "b": 0.0})
    rows = 4 * 17  # images and their tokens
    allowed = {
        "a": 2 * 0.01 + 1e-6 * typical + 16 * U32 * 5,
        "b": 1e-6 * typical + (16 * U32 + rows * U32 / 2) * 2,
    }
    for name, bound in allowed.items():
        for share, is_told in ((0.98, False), (1.02, True)):
            own = Gradients(bit_for_bit=True)
            along = wanted[name] / wanted[name].norm()
            found = wanted | {name: wanted[name] + share * bound * along}
            told = own(Evidence(gradients=found), first, bounds(FLOAT32))
            assert bool(told) is is_told, (name, share)
            assert own.bit_for_bit
            assert sum(own._shares) == pytest.approx(share, rel=1e-3)
            lengths = {"a": 0.0, "b": 0.0} | {name: share * bound / float(wanted[name].norm())}
            assert {n: v for n, [v] in own._longer.items()} == pytest.approx(lengths, abs=1e-12)
    later = Evidence(gradients=wanted)
    assert not own(later, later, bounds(FLOAT32)), "the noise of the first step is kept"
    assert [len(shares) for shares in own._longer.values()] == [2, 2]


def test_a_gradient_of_which_rounding_may_leave_nothing_has_no_length() -> None:
    wanted = named(a=[[3.0, 4.0]], b=[1.2, 1.6])  # b has the norm 2, and may be twice its noise off
    for noise, is_kept in ((0.99, True), (1.01, False)):
        own, each = Gradients(bit_for_bit=False), {"a": 0.0, "b": noise}
        found = Evidence(gradients=wanted, noise=each)
        assert not own(found, found, bounds(FLOAT32))
        assert ("b" in own._longer) is is_kept


def gradients_so_far(*, bit_for_bit: bool = True, **held: Any) -> Gradients:
    """The comparison after some steps."""
    found = Gradients(bit_for_bit)
    vars(found).update(held)
    return found


def test_gradients_of_the_same_order_are_closer_than_their_bounds() -> None:
    shares = [0.06, 0.02]  # root mean square: 0.0447
    far = [0.08, 0.02]  # 0.0583

    def is_told(own: Bounds, shares: list[float], *, bit_for_bit: bool = True) -> bool:
        gradients = gradients_so_far(bit_for_bit=bit_for_bit, _shares=shares)
        return bool(gradients.orders(NOTHING, NOTHING, own))

    assert not is_told(bounds(BFLOAT16), shares)
    assert is_told(bounds(BFLOAT16), far)
    assert is_told(bounds(MASTERS), far)
    assert not is_told(bounds(BFLOAT16), far, bit_for_bit=False)
    assert not is_told(bounds(BFLOAT16), [])
    assert not is_told(bounds(FLOAT8), far)
    two = ("resources.ranks_per_node=2",)
    for words, wanted in (
        (["sharding=fsdp", "precision=bf16_masters"], False),
        (["sharding=fsdp", "precision=bf16"], True),
        (["sharding=ddp", "precision=bf16_masters"], True),
        (["sharding=ddp", "sharding.gradient_dtype=bfloat16"], False),
        (["compilation=compile_blocks"], False),
    ):
        assert is_told(bounds(cell(*two, *words)), far) is wanted, words
    assert not is_told(bounds(BFLOAT16, world=replace(world(), device=torch.device("meta"))), far)


def test_lengths_of_gradients_agree_over_all_steps() -> None:
    """Mean lengths of 0.01 and 0: their root mean square is 0.00707, and few tensors may be off by more."""
    for spec, least in ((FLOAT32, 1e-5), (BFLOAT16, UB16)):
        allowed = least * (1 + 8 / 2)
        for share, is_told in ((0.99, False), (1.01, True)):
            mean = share * allowed * 2**0.5
            longer = {"a": [0.5 * mean, 1.5 * mean], "b": [mean, -mean]}
            own = gradients_so_far(_longer=longer)
            assert bool(own.lengths(NOTHING, NOTHING, bounds(spec))) is is_told
    assert not Gradients(bit_for_bit=True).lengths(NOTHING, NOTHING, bounds(FLOAT32))


def test_digits_of_half_precision_are_looked_for_in_float32_alone() -> None:
    full = torch.rand(64, generator=torch.Generator().manual_seed(0))
    found, noise = Evidence(gradients={"a": full.bfloat16().float()}), {"a": 1.0}
    sent = cell("sharding=ddp", "sharding.gradient_dtype=bfloat16")
    for spec, is_told in ((FLOAT32, True), (FLOAT16, False), (sent, False)):
        expected = Evidence(gradients={"a": full}, noise=noise)
        assert ("digits" in Gradients(bit_for_bit=False)(found, expected, bounds(spec))) is is_told


def updates_of(spec: CellSpec, trained: set[str], definitions: list[Any], **held: Any) -> Updates:
    """The comparison with these definitions."""
    found: Updates = object.__new__(Updates)
    own = {"_trained": trained, "_definitions": definitions, "_unrounded": None}
    vars(found).update(own | {"_squares": [0.0, 0.0]} | held)
    return found


def test_an_update_is_compared_with_the_equations() -> None:
    sgd = replace(
        FLOAT32, optimizer=alone("optimizer=sgd_loop", "optimizer.learning_rate=0.5").optimizer
    )
    before, gradients = named(a=[1.0, 0.0], b=[2.0, 2.0]), named(a=[0.0, 2.0], b=[1.0, 1.0])
    exact = ByEquations(sgd.optimizer, torch.float64)(before, gradients)
    moved = float((exact["a"] - before["a"]).norm())
    bound = 1e-4 * moved + 2 * U32 * float(exact["a"].norm())

    def is_told(held: dict[str, Tensor], trained: str = "ab") -> bool:
        own = updates_of(sgd, {*trained}, [ByEquations(sgd.optimizer, torch.float64)])
        found = Evidence(before=before, weights=held, gradients=gradients)
        return bool(own(found, NOTHING, bounds(sgd)))

    assert not is_told(exact)
    for share, wanted in ((0.99, False), (1.01, True)):
        held = exact | {"a": exact["a"] + torch.tensor([0.0, -share * bound]).double()}
        assert is_told(held) is wanted
    fixed = exact | {"b": before["b"]}
    assert is_told(fixed), "a weight that was trained stays"
    assert not is_told(fixed, "a")


def test_the_nearest_of_two_definitions_counts_for_each_tensor() -> None:
    before, gradients = named(a=[1.0], b=[1.0]), named(a=[1.0], b=[1.0])
    low, high = named(a=[0.5], b=[0.5]), named(a=[0.7], b=[0.7])
    for updates in ([low, high], [high, low]):
        definitions = [lambda weights, used, given=given: given for given in updates]
        own = updates_of(FLOAT32, {"a", "b"}, definitions)
        for last, is_told in ((0.7, False), (0.8, True)):
            held = named(a=[0.5], b=[last])
            found = Evidence(before=before, weights=held, gradients=gradients)
            assert bool(own(found, NOTHING, bounds(FLOAT32))) is is_told


def test_what_storing_loses_is_relative_to_all_updates() -> None:
    before, ideal = named(a=[1.0, 1.0], b=[1.0]), named(a=[1.0, 5.0], b=[4.0])
    own = updates_of(FLOAT16, {"a", "b"}, [lambda *_: ideal], _unrounded=lambda *_: ideal)
    assert own.told() == []
    held = named(a=[1.0, 4.0], b=[4.0])
    found = Evidence(before=before, weights=held, gradients=named(a=[1.0, 1.0], b=[1.0]))
    own(found, NOTHING, bounds(FLOAT16))
    assert own._squares == [1.0, 25.0]
    assert own.told() == ["updates 0.2 of their norm from float32's"]


def test_updates_without_rounding_are_known_where_equations_store_half() -> None:
    muon = replace(FLOAT16, optimizer=alone("optimizer=muon").optimizer)
    for spec, is_known in ((FLOAT16, True), (FLOAT32, False), (MASTERS, False), (muon, False)):
        own = bounds(spec)
        found = Updates(own, Reference(own.twin, own.world, in_parts=False))
        assert (found._unrounded is not None) is is_known


def test_averages_follow_their_equation() -> None:
    average, before, held = named(a=4.0), named(a=2.0), named(a=1.0)

    def after(*words: str, step: int = 0, repeats: int = 0) -> float:
        [own] = alone("averaging=ema", *words).averaging.checks()
        own._average = average
        own(
            Evidence(step=step, before=before, weights=held, repeats=repeats),
            NOTHING,
            bounds(FLOAT32),
        )
        return float(own._average["a"])

    late = ("averaging.warmup=false", "averaging.decay=0.5")
    assert after(*late) == 2.5
    assert after(*late, repeats=2) == 1.75, "4, 3 and 2.5 by `before`, then by `held`"
    assert after("averaging.decay=0.15") == pytest.approx(0.1 * 4 + 0.9)
    assert after("averaging.decay=0.15", step=1) == pytest.approx(0.15 * 4 + 0.85)
    assert after("averaging.decay=0.9", step=1) == pytest.approx(2 / 11 * 4 + 9 / 11)
    every = ("averaging.decay=0.9", "averaging.every=2")
    assert [after(*every, step=step, repeats=step) for step in (0, 2)] == [4.0, 4.0]
    assert after(*every, step=1) == pytest.approx(0.1 * 4 + 0.9)
    assert after(*every, step=3) == pytest.approx(2 / 11 * 4 + 9 / 11)
    assert alone().averaging.checks() == ()


def test_updates_that_an_overflow_skipped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = partial(GradScaler, init_scale=2.0**24)  # halves until gradients fit float16
    monkeypatch.setattr(update, "GradScaler", lambda device, init_scale: scaler(device))
    own = world()
    for words, overflows in ((["precision=O2", "precision.half_dtype=float16"], True), ([], False)):
        twin = twin_of(alone(*words))
        trained = TrainedTwin(twin, own)
        found = [trained.step(global_batch(twin, step, own), step, {}) for step in (0, 1)]
        skipped = int(sum(trained._trainer.skipped))
        assert (skipped > 0) is overflows
        assert [each.repeats for each in found] == [skipped, 0]


def test_weights_that_are_read_equal_those_that_are_updated_but_for_one_rounding() -> None:
    wanted = named(a=[3.0, 4.0])

    def is_read(found: dict[str, Tensor], own: Bounds) -> str:
        return checks.weights("weight", Evidence(read=found), Evidence(read=wanted), own)

    for spec, bound in ((FLOAT16, 1.01 * U16 * 5), (MASTERS, 1.01 * UB16 * 5)):
        for share, is_told in ((0.99, False), (1.01, True)):
            found = named(a=[3.0, 4.0 + share * bound])
            assert bool(is_read(found, bounds(spec))) is is_told
    for spec in (FLOAT32, BFLOAT16):
        assert not is_read(wanted, bounds(spec))
        assert is_read(named(a=[3.0, 4.0 + 1e-12]), bounds(spec))


def test_buffers_of_the_first_replica_are_compared() -> None:
    wanted = named(mean=[3.0, 4.0])
    for spec, allowed in ((FLOAT64, 1e-8), (FLOAT32, 8 * U32)):
        for share, is_told in ((0.99, False), (1.01, True)):
            there = named(mean=[3.0, 4.0 + share * allowed * 5], other=[1.0])
            found, expected = Evidence(buffers=there), Evidence(buffers=wanted)
            assert bool(checks.buffers(found, expected, bounds(spec))) is is_told
            assert not checks.buffers(found, NOTHING, bounds(spec))
            second = bounds(spec, world=world(1, replicate=2))
            assert not checks.buffers(found, expected, second)


def test_the_average_that_is_read_is_compared_with_its_equation() -> None:
    """Allowed are a share of how far the average lies from the weights, and roundings of its numbers."""
    held, wanted = named(a=[3.0, 4.0]), named(a=[3.0, 5.0])
    bound = 1e-4 * 1 + 4 * 2 * U32 * 34**0.5

    spec = alone(
        "averaging=ema", "averaging.decay=0", "averaging.warmup=false", "averaging.every=2"
    )
    for share, is_told in ((0.99, False), (1.01, True)):
        average = named(a=[3.0, 5.0 + share * bound])
        found = Evidence(before=wanted, weights=held, averaged=lambda average=average: average)
        [own] = spec.averaging.checks()
        assert bool(own(found, NOTHING, bounds(spec))) is is_told


def test_an_optimizer_is_proved_on_few_and_on_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (0, 1):
        told = iter(["wrong" * (place == fault) for place in range(2)])
        monkeypatch.setattr(prove, "series_apart", lambda *_, told=told: next(told))
        with pytest.raises(WrongResultError):
            prove.prove(FLOAT32, world())


def test_a_module_in_half_precision_is_compared_with_itself_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = named(a=[3.0, 4.0])
    bound = 6 * 0.01 + 2 * UB16 * 5
    module = object.__new__(ModuleSpec)

    class Plain:
        def __init__(self, spec: CellSpec, *_: object) -> None:
            assert spec.precision.plan().param_dtype == "float64"

        def step(self, *_: object) -> PlainStep:
            return PlainStep(torch.tensor(1.0), wanted, {})

    class Rounded:
        in_parts = False

        def __init__(self, share: float) -> None:
            self._found = named(a=[3.0, 4.0 - share * bound])

        def step(self, *_: object) -> Evidence:
            return Evidence(gradients=self._found, noise={"a": 0.01})

    def is_told(spec: CellSpec, share: float, **changed: Any) -> bool:
        own, reference = bounds(spec), cast(Reference, Rounded(share))
        own.twin = replace(own.twin, **changed)
        return bool(checks.half(reference, NOTHING, NOTHING, own))

    monkeypatch.setattr(checks, "PlainModel", Plain)
    monkeypatch.setattr(checks, "global_batch", lambda *_: None)
    monkeypatch.setattr(ModuleSpec, "norms_over_batch", False)
    for share in (0.98, 1.02):
        assert is_told(BFLOAT16, share, model=module) is (share > 1)
    assert is_told(MASTERS, 2, model=module)
    assert not is_told(BFLOAT16, 2)
    assert not is_told(FLOAT32, 2, model=module)
    assert not is_told(FLOAT16, 2, model=module)
