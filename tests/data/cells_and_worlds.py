"""Cells and worlds reduced to what data look at."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.choices import choice
from vitsweep.spec.resources import AXES, MeshShape
from vitsweep.world import World


def world(rank: int = 0, **degrees: int) -> World:
    shape = MeshShape(**(dict.fromkeys(AXES, 1) | degrees))
    return World(
        rank=rank,
        local_rank=rank,
        size=shape.world_size,
        device=torch.device("cpu"),
        shape=shape,
        mesh=None,
    )


def cell(
    data: Any = None,
    images_per_step: int = 16,
    accumulation_steps: int = 1,
    resolution_px: int = 8,
    replicas: int = 1,
    seed: int = 0,
    epochs: int = 0,
    loader: Any = None,
    objective: str = "classification",
) -> Any:
    return SimpleNamespace(
        data=data,
        model=SimpleNamespace(),
        task=SimpleNamespace(name="train" if epochs else "measure", epochs=epochs),
        batch=SimpleNamespace(
            images_per_step=images_per_step,
            scope="total",
            accumulation_steps=accumulation_steps,
            resolution_px=resolution_px,
        ),
        mesh=SimpleNamespace(data_parallel_size=replicas),
        images_per_step=images_per_step,
        micro_batch=images_per_step // (replicas * accumulation_steps),
        seed=seed,
        loader=loader or choice("loader", "workers"),
        objective=choice("objective", objective),
    )
