"""examples/own_objective, outside of the checkout, and faults in objectives that the proof must find."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import pandas as pd
from torch import Tensor
from torch.nn import functional as F

from tests.cells import TINY, entry
from tests.command import Command
from tests.documents import ROOT
from tests.ranks import World, on_ranks, placed
from vitsweep.objectives.base import Batch, OpenObjective, Step
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.objective import Objective

EXAMPLE = ROOT / "examples" / "own_objective"


def test_it_is_proved_timed_and_trained_to_a_score(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(EXAMPLE, folder)
    words = (
        "--config-dir conf objective=pixels resources.ranks_per_node=1 sweep.baseline=null sharding=none "
        "task=train task.epochs=2 task.label_smoothing=0 recipe=none measurement=smoke "
        "measurement.prove=twin sweep.report=false sweep.name=pixels"
    )
    done = Command(folder)(*words.split(), quick=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = pd.read_parquet(folder / "results" / "pixels" / "cells.parquet").to_dict("records")
    assert (row["objective"], row["objective.side_px"]) == ("pixels", 4)
    assert row["proved"].startswith("twin 0")
    assert 0 < row["held_out_loss"] < 1
    # those of classification, but for a head of 16 numbers in place of 10
    classes = entry("resources.ranks_per_node=1", "sharding=none").spec
    of_classes = classes.objective.train_flops(classes)
    assert row["model_flops_per_image"] == of_classes + 6 * 6 * classes.transformer.width


@dataclass(frozen=True, kw_only=True)
class Denoising(Objective):
    """Predicts the mean of the noise that was added to an image."""

    draws: ClassVar[bool] = True
    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {}

    planted: str = ""

    def open(self, cell: CellSpec) -> OpenObjective:
        return _OpenDenoising(cell, self.planted)


class _OpenDenoising(OpenObjective):
    def __init__(self, cell: CellSpec, planted: str) -> None:
        super().__init__(cell)
        self.planted = planted

    def prepare(self, batch: Batch, step: Step) -> Batch:
        images = batch["image"]
        if self.planted == "noise of the rank" and step.world is not None:
            step = replace(step, seed=step.seed + step.world.rank)
        if self.planted == "noise of the first images":
            step = replace(step, first=0)
        noise = step.noise("noise", len(images), *images.shape[1:])
        return {"image": images + noise, "target": 10 * noise.double().mean((1, 2, 3))}

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        parts = self.cell.batch.accumulation_steps
        factor = 2 if self.planted == "twice under accumulation" and parts > 1 else 1
        return factor * F.mse_loss(outputs[:, 0], batch["target"].to(outputs.dtype))

    def reference(self) -> OpenObjective:
        return _OpenDenoising(self.cell, "")


def told(world: World, specs: dict[str, CellSpec]) -> dict[str, str]:
    found = {}
    for name, spec in specs.items():
        try:
            found[name] = f"equal to {prove(spec, placed(world, spec)):.0e}"
        except WrongResultError as error:
            found[name] = str(error)
    return found


def test_losses_of_accumulation_and_noise_of_ranks_are_found(tmp_path: Path) -> None:
    place = ("resources.ranks_per_node=2", "resources.threads_per_rank=1")
    choices: dict[str, tuple[str, ...]] = {
        "": ("sharding=fsdp", "batch.accumulation_steps=2"),
        "ulysses": ("sequence_parallel=ulysses", "mesh.ulysses=2"),
        "twice under accumulation": ("sharding=ddp", "batch.accumulation_steps=2"),
        "noise of the first images": ("sharding=ddp",),
        "noise of the rank": ("sequence_parallel=ulysses", "mesh.ulysses=2"),
    }
    specs = {}
    for planted, words in choices.items():
        spec = entry(*TINY, *place, *words).spec
        fault = "" if planted == "ulysses" else planted
        specs[planted] = replace(spec, objective=Denoising(name="denoising", planted=fault))
    [first, _] = on_ranks(2, told, specs[""], specs, folder=tmp_path)
    assert all(first[name].startswith("equal") for name in ("", "ulysses")), first
    wrong = [name for name, said in first.items() if "differs from the reference's" in said]
    assert wrong == [*choices][2:], first
