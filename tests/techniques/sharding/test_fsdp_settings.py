"""Units, prefetching and the dtype of exchanged gradients: same training, counted bytes, reasons."""

from collections import Counter
from pathlib import Path

import pytest

from tests.cells import TINY, cell, entry
from tests.equivalence import differences
from tests.ranks import on_ranks
from tests.refusals import require
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.sharding.fsdp import _prefetch

EXACT = (
    ("sharding=fsdp", "sharding.blocks_per_unit=2"),
    ("sharding=fsdp", "sharding.blocks_per_unit=3", "memory=recompute_blocks"),
    ("sharding=fsdp", "sharding.prefetch_forward=1", "sharding.prefetch_backward=2"),
    ("sharding=zero2", "sharding.prefetch_forward=2", "batch.accumulation_steps=2"),
    ("sharding=fsdp", "sharding.blocks_per_unit=2", "sharding.prefetch_backward=1"),
    ("sharding=fsdp", "optimizer.implementation=foreach", "optimizer.clip_norm=0.5"),
)
OF_FOUR_RANKS = (
    ("sharding=fsdp", "sharding.reshard_after_forward=2"),
    ("sharding=fsdp", "sharding.reshard_after_forward=2", "sharding.blocks_per_unit=2"),
    ("sharding=hsdp", "sharding.blocks_per_unit=2", "sharding.prefetch_backward=1"),
)
HALF = tuple(
    (f"sharding={name}", "sharding.gradient_dtype=bfloat16", *more)
    for name, more in (
        ("ddp", ()),
        ("ddp", ("batch.accumulation_steps=2", "optimizer.clip_norm=0.5")),
        ("zero1", ("batch.accumulation_steps=2",)),
        ("fsdp", ()),
        ("zero2", ("sharding.blocks_per_unit=2",)),
    )
)
PLAIN = ("optimizer=sgd_loop", "optimizer.learning_rate=0.05", "model.depth=4")
DOUBLE = "precision.dtype=float64"
PREDICTED = "tests.extras.predict.test_bytes_sent"
"""Bytes by a trace: of an optional feature."""


def cells(ranks: int, choices: tuple[tuple[str, ...], ...], *more: str) -> list[CellSpec]:
    world = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1")
    return [cell(*PLAIN, *world, *chosen, *more) for chosen in choices]


def compared(ranks: int, specs: list[CellSpec], folder: Path) -> list[dict[str, float]]:
    """Differences from reference training of cells on one world after another."""
    found: dict[CellSpec, dict[str, float]] = {}
    for mesh in dict.fromkeys(spec.mesh for spec in specs):
        sharing = [spec for spec in specs if spec.mesh == mesh]
        answers, *_ = on_ranks(ranks, differences, sharing[0], sharing, folder=folder)
        found |= dict(zip(sharing, answers, strict=True))
    return [found[spec] for spec in specs]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_units_and_dtypes_train_what_the_reference_model_trains(ranks: int, tmp_path: Path) -> None:
    exact = cells(ranks, EXACT + (OF_FOUR_RANKS if ranks == 4 else ()), DOUBLE)
    half = cells(ranks, HALF)
    answers = compared(ranks, [*exact, *half], tmp_path)
    for answer in answers[: len(exact)]:
        assert answer["moved"] > 1e-3
        assert answer["loss"] < 1e-10
        assert answer["weights"] < 1e-9
    for answer in answers[len(exact) :]:
        assert answer["moved"] > 1e-3
        assert answer["loss"] < 5e-3
        assert answer["weights"] < 2e-2
    if ranks > 1:  # the gradients really were rounded
        assert max(answer["weights"] for answer in answers[len(exact) :]) > 1e-5


def bytes_by_purpose(*overrides: str) -> Counter[str]:
    found: Counter[str] = Counter()
    spec = cell(*PLAIN, "resources.ranks_per_node=4", *overrides)
    for key, value in pytest.importorskip(PREDICTED).predicted(spec, 0).items():
        found[key.partition("/")[2]] += round(value["bytes"])
    return found


@pytest.mark.parametrize(
    "sharding",
    ["ddp", *(pytest.param(name, marks=pytest.mark.full) for name in ("zero1", "fsdp", "hsdp"))],
)
def test_gradients_in_bfloat16_are_half_the_bytes(sharding: str) -> None:
    chosen = f"sharding={sharding}"
    plain = bytes_by_purpose(chosen)
    half = bytes_by_purpose(chosen, "sharding.gradient_dtype=bfloat16")
    assert half["parameter"] == plain["parameter"]
    assert half["gradient"] == pytest.approx(plain["gradient"] / 2, rel=1e-3)  # padding


def test_groups_of_ranks_gather_within_themselves_in_the_backward_pass() -> None:
    plain, groups = (
        bytes_by_purpose("sharding=fsdp", *more)
        for more in ((), ("sharding.reshard_after_forward=2",))
    )
    assert groups["gradient"] == plain["gradient"]
    # of 4 ranks 3/4 of each block is sent twice; of groups of 2 ranks the second time 1/2
    assert 0.8 * plain["parameter"] < groups["parameter"] < 0.9 * plain["parameter"]


@pytest.mark.full
def test_real_ranks_send_what_was_predicted(tmp_path: Path) -> None:
    bytes_sent = pytest.importorskip(PREDICTED)
    specs = cells(4, (EXACT[0], EXACT[2], OF_FOUR_RANKS[0], HALF[0], HALF[2]))
    of_ranks = on_ranks(4, bytes_sent.sent, specs[0], specs, folder=tmp_path)
    for index, spec in enumerate(specs):
        for rank in (0, 3):
            assert bytes_sent.same(bytes_sent.predicted(spec, rank), of_ranks[rank][index]), (
                spec.sharding
            )


def test_what_units_cannot_be_is_named() -> None:
    for overrides, part in [
        (("sharding.reshard_after_forward=3",), "must divide the 4 shards of a copy"),
        (
            ("sharding.reshard_after_forward=4",),
            "and be less: use `sharding.reshard_after_forward=2`.",
        ),
        (
            ("sharding.gradient_dtype=bfloat16", "precision=bf16_params"),
            "`precision=bf16_params` exchanges nothing in float32",
        ),
    ]:
        four = "resources.ranks_per_node=4"
        assert part in " ".join(entry(*TINY, "sharding=fsdp", four, *overrides).reasons)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp"])
def test_a_dtype_of_gradients_that_nobody_exchanges_is_refused(sharding: str) -> None:
    half = (f"sharding={sharding}", "sharding.gradient_dtype=bfloat16")
    (reason,) = entry(*TINY, *half, "resources.ranks_per_node=1").reasons
    require(reason, "`sharding.gradient_dtype=bfloat16`")
    assert not entry(*TINY, *half, "resources.ranks_per_node=2").reasons


def test_master_weights_of_shards_have_float32_gradients_and_those_of_replicas_have_not() -> None:
    chosen = ("sharding.gradient_dtype=bfloat16", "precision=bf16_masters")
    assert not entry(*TINY, "sharding=fsdp", *chosen).reasons
    [reason] = entry(*TINY, "sharding=ddp", *chosen).reasons
    require(reason, "`sharding.gradient_dtype=bfloat16`")


def test_each_unit_prefetches_those_that_come_after_it_in_either_pass() -> None:
    class Unit:
        def __init__(self, name: str) -> None:
            self.name, self.forward, self.backward = name, "", ""

        def set_modules_to_forward_prefetch(self, units: list["Unit"]) -> None:
            self.forward = "".join(unit.name for unit in units)

        def set_modules_to_backward_prefetch(self, units: list["Unit"]) -> None:
            self.backward = "".join(unit.name for unit in units)

    for ahead, behind, wanted in (
        (1, 0, ("b", "c", "d", "", "", "", "", "")),
        (2, 3, ("bc", "cd", "d", "", "", "a", "ba", "cba")),
    ):
        units = [Unit(name) for name in "abcd"]
        _prefetch(units, ahead, behind)
        assert (*(u.forward for u in units), *(u.backward for u in units)) == wanted
