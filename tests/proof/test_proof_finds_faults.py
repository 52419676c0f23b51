"""The proof finds every breakage of `tests/broken`, and calls no honest technique wrong."""

from functools import cache
from pathlib import Path

import pytest

from tests.broken.table import (
    BLAMED,
    BREAKAGES,
    CONF,
    HIDDEN,
    IN_ANY_PRECISION,
    TIMED,
    TWO,
    Breakage,
)
from tests.cells import LAPTOP, TINY, cell
from tests.command import Command
from tests.ranks import on_ranks, placed
from tests.said import opening
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.menu import conf_dir
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.world import World

PRECISIONS = ["fp32", "O0", "O1", "O2", "O3", "bf16", "bf16_params", "bf16_masters"]
CORE = {
    "gradients_x_1_05": "O1",
    "one_bias_without_gradient": "O1",
    "gradients_lost_from_the_second_step": "O1",
    "keys_of_the_batch_before": "O1",
    "weights_x_1_01": "O1",
    "third_block_x_0_9": "O1",
    "forgets_above_32_tokens": "O1",
    "keys_after_the_64th_not_rescaled": "fp32",
    "attends_to_padding": "O1",
    "never_updates": "O1",
    "half_of_the_tensors_skipped": "O1",
    "beta2_of_0_99": "O1",
    "decay_of_everything": "O1",
    "state_is_lost": "O1",
    "numbers_after_32768_are_left": "O1",
    "first_bucket_alone": "O1",
    "no_exchange": "O1",
    "rank_1_without_update": "O1",
    "half_weights_x_1_01": "O2",
    "half_scores_x_1_03": "O2",
    "masters_in_half": "O2",
    "masters_gradients_of_the_first_step": "O2",
    "unscaling_lost": "O1",
    "overflow_on_one_rank_alone": "O2",
    "unscaled_in_half": "O1",
    "reduced_in_bfloat16": "O1",
    "half_gelu_by_tanh": "O2",
    "half_logits_in_three_bits": "O3",
}
"""What `make test` breaks, under one precision."""
SHOWS_FIRST = {
    "third_block_x_0_9": "in the forward pass: `memory=broken` or",
    "gradients_x_1_05": "in the backward pass, where the loss agrees: `memory=broken` or",
    "no_exchange": "in the backward pass, where the loss agrees: `sharding=broken_ddp` or",
    "half_gelu_by_tanh": "in the forward or the backward pass, by less than the loss shows: "
    "`memory=broken` computes",
    # the fault stays in the process, in the masters themselves
    "masters_in_half": "in the update, where loss and gradients agree: `precision=O2` computes",
    "never_updates": "in the optimizer alone: `optimizer=broken` or",
}
"""What the message says of some: where the difference shows first, and who is there."""


@cache
def broken_composer() -> Composer:
    return Composer(hydra.open_loader(conf_dir(), CONF))


def broken(breakage: Breakage, precision: str) -> CellSpec:
    words = [*TINY, f"precision={precision}", *breakage.words]
    return plan_cell(broken_composer().compose(words), LAPTOP).spec


def _verdict(world: World, specs: list[CellSpec]) -> list[str]:
    found = []
    for spec in specs:
        try:
            found.append(f"equal {prove(spec, placed(world, spec)):.1e}")
        except WrongResultError as error:
            found.append(str(error))
    return found


def _verdict_of_another_rounding(world: World, spec: CellSpec) -> list[str]:
    type(spec.memory).rounds_apart = True
    return _verdict(world, [spec])


def test_a_choice_that_rounds_elsewhere_says_so_and_is_proved(tmp_path: Path) -> None:
    breakage = BREAKAGES["half_scores_rounded"]
    spec = broken(breakage, "O2")
    for [found] in on_ranks(breakage.ranks, _verdict, spec, [spec], folder=tmp_path):
        assert "says `rounds_apart = True`" in found
    honest = on_ranks(breakage.ranks, _verdict_of_another_rounding, spec, spec, folder=tmp_path)
    assert all(found.startswith("equal") for [found] in honest)


ALONE = ("half_gelu_by_tanh", "half_logits_in_three_bits")
"""What shows first of these depends on what the processes computed before."""
TOGETHER = [[n for n in CORE if BREAKAGES[n].ranks == r and n not in ALONE] for r in (1, 2)]


@pytest.mark.parametrize("names", [*TOGETHER, *([name] for name in ALONE)], ids=lambda n: n[0])
def test_a_breakage_is_found_on_every_rank(names: list[str], tmp_path: Path) -> None:
    ranks = BREAKAGES[names[0]].ranks
    specs = [broken(BREAKAGES[name], CORE[name]) for name in names]
    for verdicts in on_ranks(ranks, _verdict, specs[0], specs, folder=tmp_path, seconds=550):
        for name, told in zip(names, verdicts, strict=True):
            assert told.startswith("The nano twin's "), name
            assert name in IN_ANY_PRECISION or f" in {CORE[name]} " in told, name
            assert f"It shows first {SHOWS_FIRST.get(name, '')}" in told, name


def _verdicts_beside_a_wrong_ddp(world: World, specs: list[CellSpec], plants: bool) -> list[str]:
    """Let DDP exchange nothing where asked for."""
    if plants:
        Ddp.apply = lambda self, model, plan, world: model  # type: ignore[method-assign]
    return _verdict(world, specs)


CLEAN = [name for name in BLAMED if name not in ("sharding by itself", *[*BLAMED][-2:])]
"""They leave the process as it was."""
IN_TURN = [
    [name for name in CLEAN if (TWO[0] in BLAMED[name]) == is_two] for is_two in (False, True)
]


@pytest.mark.parametrize(
    "names",
    [
        IN_TURN[0][:2],
        ["sharding by itself"],
        *(pytest.param(n, marks=pytest.mark.full) for n in (IN_TURN[0][2:], IN_TURN[1])),
        *(pytest.param([name], marks=pytest.mark.full) for name in [*BLAMED][-2:]),
    ],
    ids=lambda names: names[0],
)
def test_of_several_choices_the_one_is_named_without_which_the_twin_agrees(
    names: list[str], tmp_path: Path
) -> None:
    specs = [broken(Breakage(BLAMED[name]), "fp32") for name in names]
    plants = names == ["sharding by itself"]
    ranks = specs[0].resources.ranks_per_node
    for verdicts in on_ranks(
        ranks, _verdicts_beside_a_wrong_ddp, specs[0], specs, plants, folder=tmp_path, seconds=550
    ):
        for name, told in zip(names, verdicts, strict=True):
            _, _, accused = told.partition("It shows first ")
            [knob] = accused.split("`")[1::2]
            group = knob.partition("=")[0]
            assert group == name.partition(" ")[0], told


def typed_alike() -> dict[str, list[str]]:
    """Words without the fault -> the breakages that differ in it alone."""
    found: dict[str, list[str]] = {}
    for name, breakage in BREAKAGES.items():
        words = [word for word in breakage.words if ".fault=" not in word]
        found.setdefault(" ".join(words), []).append(name)
    return found


@pytest.mark.full
@pytest.mark.parametrize("words", typed_alike())
def test_a_command_calls_broken_choices_wrong_in_every_precision(
    words: str, tmp_path: Path
) -> None:
    names = typed_alike()[words]
    of = {name: next((w for w in BREAKAGES[name].words if ".fault=" in w), "") for name in names}
    key = next(iter(of.values())).partition("=")[0]
    faults = [f"{key}=" + ",".join(word.partition("=")[2] for word in of.values())] if key else []
    precisions = BREAKAGES[names[0]].precisions
    run = Command(tmp_path)
    done = run(
        "-m", "--config-dir", str(CONF), *words.split(), *faults,
        f"precision={','.join(precisions)}", "measurement.prove=twin", "sweep.baseline=null",
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    cells = run.cells()
    found = {}
    for name, word in of.items():
        own = cells[cells[key] == word.partition("=")[2]] if key else cells
        by_precision = own.set_index("precision")
        for precision in precisions:
            status, reason = by_precision.loc[precision, ["status", "reason"]]
            found[name, precision] = status, reason
    wanted = {
        (name, precision): "wrong"
        if precision in BREAKAGES[name].acts and precision not in HIDDEN.get(name, ())
        else "measured"
        for name, precision in found
    }
    assert {at: told for at, told in found.items() if told[0] != wanted[at]} == {}


LARGE = [pytest.param(n, marks=[] if "fourth" in n else [pytest.mark.full]) for n in TIMED]


@pytest.mark.parametrize("name", LARGE)
def test_what_the_twin_is_too_small_for_is_found_by_the_first_timed_steps(
    name: str, tmp_path: Path
) -> None:
    run = Command(tmp_path)
    run(
        "-m", "--config-dir", str(CONF), *TIMED[name].words, f"memory.fault={name}",
        f"precision={','.join(TIMED[name].acts)}", "measurement.prove=twin", "measurement.measured_steps=4",
    )  # fmt: skip
    cells = run.cells()
    found = cells[cells["memory"] == "broken"].set_index("precision")
    missed = {p for p, status in found["status"].items() if status != "wrong"}
    assert missed == set(HIDDEN.get(name, ()))
    assert not found["reason"].str.startswith("The nano twin").any()
    if "gradients" in name:
        assert found["reason"].str.startswith(opening("wrong", what="gradient of step 1")).all()


HONEST = {
    "ddp": [("sharding=ddp",), ("sharding=zero1",)],
    "fsdp": [("sharding=fsdp",), ("sharding=zero2", "memory=recompute_blocks")],
    "tensor": [("tensor_parallel=megatron",), ("sequence_parallel=megatron_sp",)],
    "ulysses": [("sequence_parallel=ulysses",), ("sequence_parallel=ulysses", "sharding=zero1")],
    "pipeline": [("pipeline_parallel=gpipe", "batch.images_per_step=32")],
}


@pytest.mark.full
@pytest.mark.parametrize("name", HONEST)
def test_honest_techniques_pass_under_every_precision(name: str, tmp_path: Path) -> None:
    assert_honest(PRECISIONS, HONEST[name], tmp_path)


def test_honest_shards_pass_under_the_precisions_of_apex(tmp_path: Path) -> None:
    kinds = [
        ("sharding=fsdp", "memory=recompute_blocks"),
        ("sharding=zero1", "precision.half_dtype=float16", "averaging=ema"),
    ]
    assert_honest(["O1", "O2", "O3"], kinds, tmp_path)


def assert_honest(precisions: list[str], kinds: list[tuple[str, ...]], tmp_path: Path) -> None:
    specs = [
        cell(f"precision={precision}", *choices, "optimizer.clip_norm=0.5")
        for precision in precisions
        for choices in kinds
    ]
    for verdicts in on_ranks(2, _verdict, specs[0], specs, folder=tmp_path):
        assert [verdict for verdict in verdicts if not verdict.startswith("equal")] == []
