"""The proof before the first timing: it passes what is equal, and finds what is not."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import elu
from torch.nn.parallel import DistributedDataParallel

from tests.cells import GPU_NODE, cell, entry
from tests.data.cells_and_worlds import world as lone_world
from tests.faults import Exploding, Scaled
from tests.ranks import on_ranks
from tests.refusals import require
from tests.training.alone import ONE, alone
from vitsweep.errors import VitsweepError
from vitsweep.model import initialize, linear_attention
from vitsweep.model.attention import attend
from vitsweep.proof import reference
from vitsweep.proof.evidence import TrainedTwin
from vitsweep.proof.faults import WrongResultError, typical_norm
from vitsweep.proof.prove import proof_of, prove
from vitsweep.proof.twin import _share_of_replicas, exact_twin, global_batch, twin_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_variant import BlockVariant
from vitsweep.spec.technique import Check, Memory, PrecisionPlan
from vitsweep.techniques.attention import kernels
from vitsweep.techniques.averaging.ema import MovingAverage
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.techniques.sharding.none import Unsharded
from vitsweep.techniques.vit_block import branches
from vitsweep.training import update
from vitsweep.world import World


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["precision=O1"],
        ["precision=O2", "memory=recompute_blocks"],
        ["precision=O3", "optimizer=sgd_foreach"],
        ["precision=bf16_params", "optimizer=adamw_fused"],
        ["layout=batch_second", "classifier=pooled", "attention=mha_module"],
        ["optimizer=adamw_contiguous", "optimizer.clip_norm=0.1", "batch.accumulation_steps=2"],
        ["objective=self_distillation", "precision.dtype=float64"],
        ["objective=lejepa", "precision.dtype=float64", "objective.small_views=2"],
        ["objective=masked_autoencoder", "objective.decoder_heads=4"],
    ],
    ids=" ".join,
)
def test_honest_techniques_pass_within_the_tolerance_of_their_precision(
    overrides: list[str],
) -> None:
    spec = alone(*overrides)
    assert prove(spec, lone_world()) <= spec.precision.relative_tolerance()


def test_a_wrong_gradient_is_found_and_reported() -> None:
    wrong = replace(alone(), memory=Scaled(name="scaled"))
    with pytest.raises(WrongResultError) as error:
        prove(wrong, lone_world())
    require(str(error.value), "`head.weight` `memory=scaled` 1 0")
    assert re.search(r"gradient.* 1e-08 .*float64.*backward", str(error.value))


def test_complex_parameters_are_proved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "model.target=tests.user_modules.with_complex_filters"
    spec = entry("model=module", target, "precision=O2", "optimizer=adamw_foreach", "sharding=none",
                 "resources.ranks_per_node=1", "batch.images_per_step=16").spec  # fmt: skip
    assert prove(spec, lone_world()) <= spec.precision.relative_tolerance()

    take = update.MasterWeights.take_gradients

    def real(masters: update.MasterWeights) -> None:
        take(masters)
        for parameter in (p for group in masters.groups for p in group["params"]):
            if parameter.is_complex():
                parameter.grad = parameter.grad.real.to(parameter.dtype)

    monkeypatch.setattr(update.MasterWeights, "take_gradients", real)
    with pytest.raises(WrongResultError, match=r"layers\.\d\.(filter|mixing_weight)"):
        prove(spec, lone_world(), exactly=False)


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    spec = entry("model=module", "model.target=tests.user_modules.flat", "sharding=none",
                 "resources.ranks_per_node=1", "batch.images_per_step=16").spec  # fmt: skip
    with pytest.raises(VitsweepError) as error:
        prove(spec, lone_world())
    require(str(error.value), "`model=module` `measurement.prove=none` 4")


def test_a_loss_that_is_not_a_number_is_wrong() -> None:
    with pytest.raises(WrongResultError):
        prove(replace(alone(), memory=Exploding(name="exploding")), lone_world())


def test_a_wrong_optimizer_is_found_by_its_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdamW.arguments

    def twice_the_rate(choice: AdamW) -> dict[str, Any]:
        given = honest(choice)
        return given | {"lr": given["lr"] * (2 if choice.implementation == "fused" else 1)}

    monkeypatch.setattr(AdamW, "arguments", twice_the_rate)
    with pytest.raises(WrongResultError, match=r"optimizer's definition .*adamw_fused`"):
        prove(alone("optimizer=adamw_fused"), lone_world())
    with pytest.raises(WrongResultError, match=r"`.*`optimizer=adamw_fused`"):
        prove(alone("optimizer=adamw_fused"), lone_world(), exactly=False)


FAULTS: dict[str, tuple[list[str], Any, str, Any]] = {
    "branches one after the other": (
        ["vit_block=parallel"],
        branches.ParallelBlock,
        "forward",
        lambda block, x, context: (
            x + block.mlp_branch(x + block.attend_branch(block.norm_attention(x)))
        ),
    ),
    "unscaled branches": (
        ["vit_block=drop_samples"],
        branches._AddedAt,
        "apply",
        lambda x, added, places, axis, scale: x.index_add(axis, places, added),
    ),
    "patches of the image before": (
        ["tokens=drop"],
        initialize,
        "picked_rows",
        lambda x, places: initialize._picked_one_by_one(x.roll(1, 0), places),
    ),
    "no mask": (
        ["attention=sdpa_causal", "classifier=pooled"],
        kernels.CausalAttend,
        "__call__",
        lambda own, q, k, v: attend(q, k, v),
    ),
    "keys that are not divided": (
        ["attention=linear"],
        linear_attention,
        "features",
        lambda q, k, v: (elu(q) + 1, elu(k) + 1, v),
    ),
    "decay from the next token on": (
        ["attention=linear", "attention.causal=true", "attention.decay=0.9", "classifier=pooled"],
        linear_attention,
        "_distances",
        lambda decay, size, like: torch.ones(size, size, dtype=like.dtype).tril() * decay,
    ),
}
"""Fault -> the choice that changes the model, and which part of its code is replaced by what."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_choice_that_changes_the_model_is_compared_with_other_code_than_its_own(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, owner, name, wrong = FAULTS[fault]
    assert "not proved" not in proof_of(alone(*words), lone_world())
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(WrongResultError):
        prove(alone(*words), lone_world())


@dataclass(frozen=True, kw_only=True)
class Doubling(BlockVariant):
    """Doubles what a block is given, and brings no plain code of that."""

    changes_model: ClassVar[bool] = True

    def apply(self, model: nn.Module) -> nn.Module:
        first: nn.Module = model.blocks[0]  # type: ignore[index, assignment]
        first.register_forward_pre_hook(lambda block, given: (2 * given[0],))
        return model


class Silent(Doubling):
    """Does the same, and does not say that the model is another."""

    changes_model = False


def test_a_choice_without_reference_code_is_named_as_not_proved() -> None:
    told = proof_of(replace(alone(), vit_block=Doubling(name="doubling")), lone_world())
    assert "; not proved: vit_block=doubling, " in told
    with pytest.raises(WrongResultError):
        prove(replace(alone(), vit_block=Silent(name="silent")), lone_world())


def _verdict(world: World, spec: CellSpec) -> str:
    try:
        return f"equal {prove(spec, world):.1e}"
    except WrongResultError as error:
        return str(error)


def test_ranks_that_train_differently_are_found_on_every_rank(tmp_path: Path) -> None:
    apart = replace(cell(), sharding=Unsharded(name="none"))
    for told in on_ranks(2, _verdict, apart, apart, folder=tmp_path):
        assert "twin's gradient" in told


def test_equal_gradients_of_pooled_tokens_may_add_up_in_two_halves(tmp_path: Path) -> None:
    """The last bias sums 512 equal rows: one by one, or half of them on each rank."""
    video = ["model=video_vit_nano", "data=moving_digits", "sequence_parallel=dsp"]
    spec = entry(*video, "resources.ranks_per_node=2").spec
    for told in on_ranks(2, _verdict, spec, spec, folder=tmp_path):
        assert told.startswith("equal")


@dataclass(frozen=True, kw_only=True)
class Drifting(Unsharded):
    """Moves the running statistics of BatchNorm after each pass."""

    def apply(self, model: nn.Module, plan: PrecisionPlan, world: World) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.register_forward_hook(_moved)
        return super().apply(model, plan, world)


def _moved(norm: nn.BatchNorm1d, *_: object) -> None:
    assert norm.running_mean is not None
    norm.running_mean.data += 0.1  # autograd does not see it


WITH_BATCH_NORM = ("model=module", "model.target=tests.user_modules.with_batch_norm")


def test_running_statistics_that_a_technique_moves_are_found() -> None:
    normed = entry(*WITH_BATCH_NORM, "batch.images_per_step=16", *ONE).spec
    prove(normed, lone_world())
    with pytest.raises(WrongResultError, match=r"`.*running_mean`"):
        prove(replace(normed, sharding=Drifting(name="none")), lone_world())


def test_a_twin_of_very_many_replicas_computes_few_shares_and_no_group_has_all_of_them() -> None:
    many = ("resources.nodes=256", "resources.ranks_per_node=8", "batch.scope=per_replica")
    twin = twin_of(cell("model=vit_large", "data=synthetic", *many, machine=GPU_NODE))
    images = global_batch(twin, 0, lone_world())["image"]
    assert len(images) == 64 * twin.images_per_step / 2048
    shares = np.array(_share_of_replicas(2048, 64))
    assert shares[0] == 0
    for size in (2048, 1024, 256, 64, 8):
        for groups in (shares.reshape(-1, size), shares.reshape(size, -1).T):
            complete = [len({*np.bincount(group, minlength=64)}) == 1 for group in groups]
            assert complete == [size == 2048] * len(groups)


@dataclass(frozen=True, kw_only=True)
class InPairs(Ddp):
    """Averages gradients over pairs of ranks instead of all."""

    def apply(self, model: nn.Module, plan: PrecisionPlan, world: World) -> nn.Module:
        pair, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        return DistributedDataParallel(model, process_group=pair)


def _verdicts_of_two_shares(world: World, specs: list[CellSpec]) -> list[str]:
    reference.LEAST_SHARES, reference.MOST_SHARES = 2, 2
    return [_verdict(world, spec) for spec in specs]


def test_replicas_that_compute_the_same_shares_pass_only_where_all_of_them_are_averaged(
    tmp_path: Path,
) -> None:
    honest = cell("resources.ranks_per_node=4", "resources.threads_per_rank=1")
    apart = replace(honest, sharding=InPairs(**vars(honest.sharding)))
    both = [honest, apart]
    for told in on_ranks(4, _verdicts_of_two_shares, honest, both, folder=tmp_path):
        assert told[0].startswith("equal")
        assert "twin's gradient" in told[1]


TOO_HIGH = 2.0**19


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_scale_that_starts_too_high_is_no_wrong_result(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 gradients overflow until the scale has halved; the twin repeats those steps."""
    scalers: list[GradScaler] = []

    def too_high(device: str, init_scale: float) -> GradScaler:
        scalers.append(GradScaler(device, init_scale=TOO_HIGH))
        return scalers[-1]

    monkeypatch.setattr(update, "GradScaler", too_high)
    spec = alone(f"precision={level}", "precision.half_dtype=float16")
    assert prove(spec, lone_world()) <= spec.precision.relative_tolerance()
    assert scalers
    assert all(one.get_scale() < TOO_HIGH for one in scalers), "there were overflows"


def test_a_loss_scale_that_never_fits_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitsweep.proof.twin.HALVINGS", 2)
    spec = alone("precision=O1", "precision.half_dtype=float16", "precision.loss_scale=1e9")
    with pytest.raises(WrongResultError):
        prove(spec, lone_world())


def test_an_average_of_the_weights_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["precision=O2"],
        ["precision=O3"],
        ["averaging.every=2", "averaging.warmup=false"],
    ):
        assert "not proved" not in proof_of(alone("averaging=ema", *words), lone_world())
    monkeypatch.setattr(MovingAverage, "update", lambda *_: None)
    with pytest.raises(WrongResultError, match="average"):
        prove(alone("averaging=ema"), lone_world())


class Counted(Memory):
    """Says of the third step that something differs."""

    def checks(self) -> tuple[Check]:
        return (lambda found, expected, bounds: "count differs," * (found.step == 2),)


def test_a_choice_adds_a_check_of_its_own() -> None:
    with pytest.raises(WrongResultError) as error:
        prove(replace(alone(), memory=Counted(name="counted")), lone_world())
    told = str(error.value)
    assert told.startswith("The nano twin's count differs, in step 3 in float64 (rank 0).")
    assert told.endswith(
        "`memory=counted` computes something else, and without it the twin agrees."
    )


def test_what_updates_lose_where_weights_are_stored_in_half_is_stated() -> None:
    told = proof_of(alone("precision=O3", "precision.half_dtype=bfloat16"), lone_world())
    lost = re.fullmatch(
        r"twin .*; bit for bit in float64; updates (.*) of their norm from float32's", told
    )
    assert lost
    # A step of 0.001 is rounded to the last digits of weights of 0.1: 2**-11.
    assert 0.1 < float(lost[1]) < 1
    assert "updates" not in proof_of(alone("precision=O2"), lone_world())


def test_a_twin_is_nano_and_keeps_every_technique() -> None:
    spec = cell("model=vit_huge_14", "data=synthetic", "precision=O2", "sharding=fsdp")
    twin = twin_of(spec)
    assert twin.techniques == spec.techniques
    assert (twin.mesh, twin.resources, twin.seed) == (spec.mesh, spec.resources, spec.seed)
    assert twin.model.depth == 3
    assert twin.model.width == spec.model.width  # heads of 8 are narrower than the twin's 16
    assert twin.model.patch_px == spec.model.patch_px
    assert twin.images_per_step <= 16


def test_cells_that_differ_in_their_precision_alone_share_the_run_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    legs: list[str] = []
    begin = TrainedTwin.__init__

    def noted(own: TrainedTwin, twin: CellSpec, world: World) -> None:
        legs.append(twin.precision.name)
        begin(own, twin, world)

    monkeypatch.setattr(TrainedTwin, "__init__", noted)
    earlier = ""
    for precision in ("fp32", "O1", "O3"):
        earlier = proof_of(alone(f"precision={precision}"), lone_world(), earlier)
    assert legs == ["float64", "fp32", "O1", "O3"]


def test_weights_are_compared_in_the_dtype_in_which_they_are_updated() -> None:
    """By it their optimizer rounds each operation, and so must the reference implementation."""
    for precision, dtype in (("O2", torch.float32), ("O3", torch.bfloat16), ("O1", torch.float32)):
        twin = twin_of(alone("sharding=zero1", f"precision={precision}"))
        found = TrainedTwin(twin, lone_world()).now().weights
        assert {weight.dtype for weight in found.values()} == {dtype}, precision


def test_in_float64_nothing_but_rounding_differs() -> None:
    assert prove(alone("precision.dtype=float64"), lone_world()) < 1e-12


def test_gradients_of_a_twin_fill_several_buckets_but_under_a_compiler_that_takes_large_ones() -> (
    None
):
    two = ("sharding=ddp", "resources.ranks_per_node=2")
    assert twin_of(cell(*two)).sharding.bucket_mib < 0.2
    assert twin_of(cell(*two, "compilation=compile_model")).sharding.bucket_mib >= 1


def test_a_cell_in_float64_is_not_compared_in_float32_first() -> None:
    normed = entry(*WITH_BATCH_NORM, "precision=fp32").spec
    assert exact_twin(twin_of(normed)).precision.plan().param_dtype == "float32"  # it has BatchNorm
    wide = entry(*WITH_BATCH_NORM, "precision=fp32", "precision.dtype=float64").spec
    assert exact_twin(twin_of(wide)).precision.plan().param_dtype == "float64"


def test_a_typical_norm_is_the_root_of_the_mean_square() -> None:
    assert typical_norm({"a": 3.0, "b": 4.0}) == pytest.approx(12.5**0.5)
