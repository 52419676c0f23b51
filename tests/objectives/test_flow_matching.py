"""Trainings by flow matching equal an implementation of their formulas, on one to four ranks."""

import math
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import TINY, entry
from tests.cells import cell as tiny_cell
from tests.equivalence import STEPS
from tests.objectives import by_hand
from tests.ranks import on_ranks
from tests.techniques.sequence_parallel.cases import answers
from tests.training.test_checkpoint import TRAINING, assert_same, interrupted, periodic
from vitsweep.errors import VitsweepError
from vitsweep.model.build import build_model
from vitsweep.objectives.base import Pair, Step
from vitsweep.objectives.dit_spec import STDiTSpec
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.proof.reference import step_of_all
from vitsweep.proof.twin import global_batch, mean_over_replicas, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import whole_tensors
from vitsweep.world import World

EXACT = (
    "objective=flow_matching",
    "objective.dropped=0.5",
    "precision.dtype=float64",
    "optimizer=sgd_loop",
    "optimizer.learning_rate=0.2",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.clip_norm=null",
    "batch.images_per_step=4",
)
DIT = ("model=dit_nano", "batch.resolution_px=6", "model.depth=2", "model.width=16",
       "model.num_heads=2", "model.mlp_width=24")  # fmt: skip
STDIT = ("model=stdit_nano", "data=moving_digits", "data.num_frames=5", "batch.resolution_px=12",
         "model.depth=3", "model.width=16", "model.num_heads=2", "model.mlp_width=24")  # fmt: skip

TEXT = (*STDIT, "data=synthetic_latents", "data.num_frames=5", "data.text_vectors=5", "data.text_width=7",
        "data.num_channels=2", "data.num_classes=4")  # fmt: skip


def plan_of(ranks: int, *overrides: str) -> PlannedCell:
    tiny = [text for text in TINY if not text.startswith("model.")]
    return entry(*tiny, *EXACT, f"resources.ranks_per_node={ranks}", *overrides)


def cell(ranks: int, *overrides: str) -> CellSpec:
    found = plan_of(ranks, *overrides)
    assert not found.reasons, found.reasons
    return found.spec


def twin(each: CellSpec) -> CellSpec:
    return replace(each, model=replace(each.model, zero_start=False))


def trained_by_hand(each: CellSpec, batches: list[Any], weights: by_hand.Weights) -> list[float]:
    """Train by gradient descent in place; return the losses."""
    network = by_hand.stdit if isinstance(each.model, STDiTSpec) else by_hand.dit
    losses = []
    for number, batch in enumerate(batches):
        data = batch["image"].double()
        at = step_of_all(each, batch, number)
        noise = at.noise("noise", *data.shape).double()
        is_uniform = each.objective.times == "uniform"
        drawn = (at.uniform if is_uniform else at.normal)("times", len(data)).tolist()
        times = drawn if is_uniform else [1 / (1 + math.exp(-u)) for u in drawn]
        frames = data.shape[2] if data.ndim == 5 else 1
        r = data.shape[-1] / 64 * math.sqrt(frames) if each.objective.shift else 1.0
        times = [r * t / (1 + (r - 1) * t) for t in times]
        times = torch.tensor(times, dtype=torch.float32).tolist()
        lost = at.uniform("dropped", len(data)) < 0.5
        if "label" in batch:
            pairs = zip(batch["label"].tolist(), lost, strict=True)
            read = [each.model.num_classes if gone else label for label, gone in pairs]
        else:
            texts = zip(batch["text"].double(), batch["text_length"].tolist(), lost, strict=True)
            read = [(weights["no_text"] if gone else text)[:n] for text, n, gone in texts]
        loss = by_hand.loss(network, weights, each.model, data, noise, times, read)
        gradients = torch.autograd.grad(loss, [*weights.values()], materialize_grads=True)
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= 0.2 * gradient
        losses.append(float(loss.detach()))
    return losses


def differences(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    known: dict[Any, Any] = {}
    found = []
    for each in map(twin, cells):
        batches = [global_batch(each, step, world) for step in range(STEPS)]
        torch.manual_seed(each.seed)
        model = build_model(each).double()
        first = {n: p.detach().clone() for n, p in model.named_parameters()}
        trainer = parallelize(model, each, world)
        losses = [
            mean_over_replicas(trainer.step(iter(my_share(each, batch, world))), world)
            for batch in batches
        ]
        weights = whole_tensors(trainer, lambda p: p)
        key = (each.model, each.objective, each.images_per_step)
        if world.rank == 0 and key not in known:
            own = {n: w.clone().requires_grad_() for n, w in first.items()}
            known[key] = trained_by_hand(each, batches, own), own
        if world.rank:
            found.append({})
            continue
        wanted, named = known[key]
        # A text of one vector is all that a token reads: its query does not move.
        moved = {n: (w.detach() - first[n]).norm().clamp_min(1e-5) for n, w in named.items()}
        apart = {
            n: float((weights[n].detach().reshape(-1) - w.detach().reshape(-1)).norm() / moved[n])
            for n, w in named.items()
        }
        found.append(
            {
                "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
                "weights": max(apart.values()),
                "of": max(apart, key=apart.get),
            }
        )
    if world.size > 1:
        torch.distributed.barrier()
    return found


ALONE = [
    (1, *DIT),
    (1, *STDIT),
    (1, *TEXT),
    (1, *TEXT, "attention.text=packed", "objective.shift=true"),
    (1, *DIT, "objective.shift=true", "batch.accumulation_steps=2"),
]
MORE = [
    (2, *DIT, "sharding=zero1", "batch.accumulation_steps=2"),
    (2, *DIT, "sharding=zero2", "averaging=ema"),
    (2, *DIT, "sharding=fsdp", "compilation=compile_blocks"),
    (2, *DIT, "sequence_parallel=ulysses", "attention=sdpa_math"),
    (2, *DIT, "sequence_parallel=ring", "memory=recompute_blocks"),
    (2, *DIT, "tensor_parallel=megatron", "objective.times=logit_normal"),
    (2, *TEXT, "sequence_parallel=ring", "memory=recompute_selected"),
    (2, *TEXT, "sequence_parallel=dsp", "sharding=fsdp", "attention.text=packed"),
    (2, *TEXT, "compilation=compile_blocks", "sharding=ddp"),
    (4, *DIT, "sharding=hsdp"),
    (4, *TEXT, "sequence_parallel=dsp", "mesh.sequence=2", "sharding=fsdp"),
    (4, *TEXT, "sequence_parallel=usp"),
    (4, *TEXT, "sequence_parallel=megatron_sp", "mesh.tensor=2", "sharding=zero1"),
    (
        4,
        *TEXT,
        "sequence_parallel=ulysses",
        "tensor_parallel=megatron",
        "mesh.tensor=2",
        "model.num_heads=4",
    ),
]
OVER_RANKS = [
    (2, *DIT, "sharding=fsdp", "memory=recompute_blocks"),
    (2, *DIT, "sequence_parallel=megatron_sp"),
    (2, *STDIT, "sequence_parallel=dsp"),
    (2, *STDIT, "sequence_parallel=megatron_sp"),
    (2, *TEXT, "tensor_parallel=megatron", "memory=recompute_selected"),
    (2, *TEXT, "sequence_parallel=megatron_sp", "attention.text=packed"),
    (2, *STDIT, "sequence_parallel=ulysses"),
]


OBJECTIVES = {DIT: ("objective.shift=true",), STDIT: ("objective.times=uniform",), TEXT: ()}
DRAWN = {
    "batch.accumulation_steps": "1 1 2",
    "sharding": "none ddp zero1 zero2 fsdp hsdp",
    "sequence_parallel": "none none ulysses ring usp lss dsp dsp megatron_sp megatron_sp",
    "tensor_parallel": "none none none megatron",
    "memory": "keep_all recompute_blocks recompute_selected",
    "attention": "sdpa_auto sdpa_auto sdpa_math",
    "attention.text": "- - packed",
    "compilation": "eager eager eager eager compile_blocks",
    "averaging": "none none ema",
    "optimizer": "sgd_loop sgd_foreach sgd_fused",
    "layout.patch_embedding": "- - - linear",
}
"""Setting -> choices; - leaves it as it is."""


def drawn_cells(seed: int, of_ranks: dict[int, int]) -> list[CellSpec]:
    """Valid cells: ranks -> how many."""
    generator, found = random.Random(seed), []
    for ranks, number in of_ranks.items():
        cells: dict[str, CellSpec] = {}
        while len(cells) < number:
            chosen = {key: generator.choice(text.split()) for key, text in DRAWN.items()}
            words = [f"{key}={choice}" for key, choice in chosen.items() if choice != "-"]
            model = generator.choice([*OBJECTIVES])
            degree = generator.choice(("auto", "2"))
            axis = {"megatron_sp": "tensor", "ulysses": "ulysses", "ring": "ring"}.get(
                chosen["sequence_parallel"], "sequence"
            )
            with suppress(VitsweepError):  # the model has no such setting
                each = plan_of(
                    ranks, *model, *OBJECTIVES[model],
                    f"batch.images_per_step={6 if ranks == 3 else 4}", f"mesh.{axis}={degree}", *words,
                )  # fmt: skip
                if not each.reasons:
                    cells[each.cell_id] = each.spec
        found += cells.values()
    return found


def check(cells: list[CellSpec], folder: Path) -> None:
    for name, found in answers(differences, cells, folder):
        assert found["loss"] < 1e-10, (name, found)
        assert found["weights"] < 1e-9, (name, found)


def test_trainings_equal_their_formulas(tmp_path: Path) -> None:
    check([cell(*each) for each in ALONE], tmp_path)


@pytest.mark.slow
def test_trainings_on_ranks_equal_their_formulas(tmp_path: Path) -> None:
    check([cell(*each) for each in OVER_RANKS], tmp_path)


@pytest.mark.full
def test_more_trainings_equal_their_formulas(tmp_path: Path) -> None:
    check([cell(*each) for each in MORE], tmp_path)


@pytest.mark.full
def test_drawn_trainings_equal_their_formulas(tmp_path: Path) -> None:
    check(drawn_cells(68, {1: 4, 2: 12, 3: 10, 4: 14}), tmp_path)


def test_noise_times_and_dropped_conditions_belong_to_images() -> None:
    """They have their distributions, differ between images and steps, and are the same in every split."""
    number = 256
    each = cell(1, *DIT, f"batch.images_per_step={number}")
    objective = each.objective.open(each)
    batch = objective.example(number, torch.Generator().manual_seed(0))

    def prepared(step: int, first: int, images: int, held_out: bool = False) -> dict[str, Tensor]:
        at = Step(seed=0, number=step, total=None, first=first, num_images=number,
                  device=torch.device("cpu"), of_held_out=held_out)  # fmt: skip
        part = Pair({name: value[first : first + images] for name, value in batch.items()})
        return dict(objective.prepare(part, at)) | {"t": objective.times(at, images)}

    whole = prepared(0, 0, number)
    for images in (64, 128):
        parts = [prepared(0, first, images) for first in range(0, number, images)]
        for name, value in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), value), name
    noise = batch["image"].double() - whole["velocity"]
    assert float(noise.mean()) == pytest.approx(0, abs=0.05)
    assert float(noise.var()) == pytest.approx(1, abs=0.05)
    rows = noise.flatten(1)
    alike = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert float(alike.abs().max()) < 0.99  # no two images have the same noise
    told = torch.logit(whole["t"].double())
    assert float(told.mean()) == pytest.approx(0, abs=0.25)
    assert float(told.std()) == pytest.approx(1, abs=0.18)
    lost = (whole["label"] == each.model.num_classes).double()
    assert float(lost.mean()) == pytest.approx(0.5, abs=0.12)
    assert bool((whole["label"] == batch["label"])[lost == 0].all())
    for name, value in prepared(1, 0, number).items():
        assert not torch.equal(value, whole[name]), name
    kept, again = prepared(0, 0, number, held_out=True), prepared(7, 0, number, held_out=True)
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    assert torch.equal(kept["label"], batch["label"])


def test_the_score_is_the_loss_of_held_out_images_by_hand() -> None:
    each = twin(cell(1, *DIT))
    torch.manual_seed(0)
    model = build_model(each).double()
    objective = each.objective.open(each)
    batch = objective.example(3, torch.Generator().manual_seed(0))
    at = replace(step_of_all(each, batch, 5), of_held_out=True)
    read = objective.prepare(batch, at)
    outputs = model(**{name: read[name] for name in ("image", "time", "label")})
    total, count = objective.score(outputs, read, at)["held_out_loss"]
    times = [1 / (1 + math.exp(-u)) for u in at.normal("times", 3).tolist()]
    wanted = by_hand.loss(
        by_hand.dit, dict(model.named_parameters()), each.model, batch["image"].double(),
        at.noise("noise", *batch["image"].shape).double(),
        torch.tensor(times, dtype=torch.float32).tolist(), batch["label"].tolist(),
    )  # fmt: skip
    assert count == 3
    assert float((total / count).detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)


@pytest.mark.full
def test_a_training_that_is_stopped_or_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights, optimizer state, averaged weights and the loss on held-out images."""
    common = ("objective=flow_matching", "averaging=ema", "averaging.decay=0.9")
    kinds = [
        (*common, "model=dit_nano", "sharding=ddp"),
        (*common, "model=dit_nano", "sharding=fsdp", "precision=O1"),
        (*common, "model=stdit_nano", "data=moving_digits", "data.num_frames=4",
         "sequence_parallel=dsp", "sharding=zero1"),
    ]  # fmt: skip
    for name in ("stopped", "killed"):
        (tmp_path / name).mkdir()
    stopped = interrupted(tmp_path / "stopped", 2, kinds, (1, 6))
    cells = [tiny_cell(*TRAINING, "resources.ranks_per_node=2", *kind) for kind in kinds]
    killed = on_ranks(2, periodic, cells[0], cells, tmp_path / "killed", folder=tmp_path)
    for of_rank in (*stopped, *killed):
        for whole, resumed, steps in of_rank:
            assert 1 <= len(steps) <= 2
            assert 0 < steps[0] < 8
            assert whole["averages"]
            assert_same(whole, resumed)
