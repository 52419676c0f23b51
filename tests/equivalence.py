"""What the equivalence tests run on every rank: a cell's training beside reference training."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitsweep.model.build import build_model
from vitsweep.model.initialize import plain_name
from vitsweep.objectives.base import as_entries
from vitsweep.parallelize import parallelize
from vitsweep.proof.reference import (
    _cast,
    _loss_of_replica,
    cut,
    is_cut,
    plain_model,
    step_of_all,
)
from vitsweep.proof.twin import global_batch, mean_over_replicas, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import MicroBatch
from vitsweep.training.update import parameter_groups
from vitsweep.world import World

STEPS = 3


Plain = dict[Any, tuple[list[float], dict[str, Tensor]]]
"""Losses and weights of reference trainings, by all that they depend on."""


def differences(world: World, cells: list[CellSpec]) -> list[dict[str, Any]]:
    """Train each cell and its plain twin; return the largest differences of losses and weights.

    Cells share one world, so that many combinations cost one start of processes, and one plain
    training where it is the same. Only rank 0 compares; the others' answers are empty.
    """
    plain: Plain = {}
    answers = [_difference(world, cell, plain) for cell in cells]
    if dist.is_initialized():
        dist.barrier()  # rank 0 compares longer: a rank that left would cut its last collective
    return answers


def _difference(world: World, cell: CellSpec, plain: Plain) -> dict[str, Any]:
    batches = [global_batch(cell, step, world) for step in range(STEPS)]
    try:
        losses, weights = _trained(world, cell, batches)
        if world.rank:
            return {}
        wanted, reference = trained_plainly(cell, batches, world, plain)
    except Exception as error:
        raise AssertionError(
            f"{ {g: t.name for g, t in cell.techniques.items()} }: {error!r}"
        ) from error
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "weights": max(
            float((weights[name] - value).abs().max() / value.abs().max().clamp_min(1e-3))
            for name, value in reference.items()
        ),
        "moved": abs(wanted[-1] - wanted[0]),
    }


def trained_plainly(
    cell: CellSpec, batches: list[tuple[Tensor, Tensor]], world: World, known: Plain
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of the plain twin of a cell, from those `known` where it was trained."""
    twin = replace(cell, optimizer=cell.optimizer.plain())
    key = _read_by_plain_training(twin)
    if key not in known:
        model = plain_model(twin, world.device)
        losses = train_plain(model, twin, batches)
        known[key] = losses, whole_weights(model.named_parameters())
    return known[key]


def train_plain(model: nn.Module, cell: CellSpec, batches: list[MicroBatch]) -> list[float]:
    """Train `model` with the cell's optimizer, in place; return the loss of each step.

    Float32, or float64 where the cell computes in it.
    """
    dtype = torch.float64 if cell.precision.plan().param_dtype == "float64" else torch.float32
    _cast(model, dtype)
    optimizer = cell.optimizer.build(parameter_groups(model, cell.optimizer.weight_decay))
    losses, objective = [], cell.objective.open(cell).reference()
    for step, batch in enumerate(map(as_entries, batches)):
        at = step_of_all(cell, batch, step)
        replicas = cut(batch, cell.mesh.data_parallel_size if is_cut(cell) else 1)
        parts = [
            _loss_of_replica(objective, model, own, dtype, at, replica)
            for replica, own in enumerate(replicas)
        ]
        loss = torch.stack(parts).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if cell.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cell.optimizer.clip_norm)
        optimizer.step()
    return losses


def _read_by_plain_training(twin: CellSpec) -> Any:
    changing = tuple(t for t in twin.techniques.values() if t.changes_model)
    float64 = twin.precision.plan().param_dtype == "float64"
    optimizer = replace(twin.optimizer, name="plain")
    replicas = twin.mesh.data_parallel_size  # norms over a batch see its parts
    return twin.model, twin.batch, replicas, twin.seed, changing, float64, optimizer


def _trained(
    world: World, cell: CellSpec, batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(cell.seed)
    trainer = parallelize(build_model(cell).to(world.device), cell, world)
    losses = [
        mean_over_replicas(trainer.step(iter(my_share(cell, batch, world))), world)
        for batch in batches
    ]
    return losses, whole_weights(trainer.model.named_parameters())


def whole_weights(named: Any) -> dict[str, Tensor]:
    """Return whole weights in float64, flat, under names that no wrapper or kernel changes."""
    found = {}
    for name, parameter in named:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[plain_name(name)] = whole.detach().double().reshape(-1)
    return found
