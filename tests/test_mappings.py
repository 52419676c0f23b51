"""Data that give mappings: a model of several inputs with a loss and a metric of its own."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitsweep
from tests.cells import entry
from tests.command import Command
from tests.data.cells_and_worlds import world as one_rank
from tests.extras import NEEDS_APPLY
from tests.ranks import on_ranks, placed
from tests.refusals import named
from tests.user_data import masked_batch
from tests.user_modules import Masked, calibration_error, class_and_size
from vitsweep.model.build import build_model, first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import train_epochs
from vitsweep.training.shards import plain_weights
from vitsweep.world import World

DATA = ("data=module", "data.target=tests.user_data.MaskedImages", "data.num_classes=10",
        "data.num_channels=1", "data.native_resolution_px=8", "data.num_workers=0",
        "++data.test_arguments.first=64")  # fmt: skip
MASKED = (*DATA, "data.label=label", "model=module", "model.target=tests.user_modules.Masked",
          "model.twin_batch=tests.user_data.masked_batch", "batch.images_per_step=16",
          "resources.threads_per_rank=1")  # fmt: skip
OWN_LOSS = "objective=module", "objective.target=tests.user_modules.class_and_size"
TRAIN = ("task=train", "task.epochs=2", "task.label_smoothing=0",
         "task.held_out=tests.user_modules.confidences")  # fmt: skip
SGD = ("optimizer=sgd_loop", "optimizer.momentum=0", "optimizer.learning_rate=0.05",
       "optimizer.weight_decay=0", "optimizer.clip_norm=null")  # fmt: skip
KINDS = {
    "fsdp": ("sharding=fsdp", "memory=recompute_blocks", "batch.accumulation_steps=2"),
    "ddp": ("sharding=ddp",),
}  # fmt: skip
MORE = {
    "zero1": ("sharding=zero1", "memory=recompute_selected", "batch.accumulation_steps=2"),
    "zero2": ("sharding=zero2", "data.num_workers=1"),
    "compiled": ("sharding=fsdp", "compilation=compile_blocks"),
    "compiled as a whole": ("sharding=ddp", "compilation=compile_model"),
}


def chosen(*overrides: str, loss: tuple[str, ...] = OWN_LOSS) -> CellSpec:
    found = entry(*MASKED, *loss, *overrides)
    assert not found.reasons, found.reasons
    return found.spec


def computed(world: World, cells: dict[str, CellSpec]) -> dict[str, tuple[float, float, Any]]:
    """Return by cell the proof, how far weights are from a plain loop, and what a training keeps."""
    found = {}
    warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")  # `size` is one
    for name, cell in cells.items():
        here = placed(world, cell)
        trainer = parallelize(first_model(cell), cell, here)
        torch.manual_seed(cell.seed)
        plain = build_model(cell)
        for seed in range(2):
            batch = masked_batch(16, 8, seed)
            parts = cell.batch.accumulation_steps
            cuts = {name: part.chunk(2)[world.rank].chunk(parts) for name, part in batch.items()}
            micro = [{n: part[i] for n, part in cuts.items()} for i in range(parts)]
            trainer.step(iter(micro))
            plain.zero_grad()
            class_and_size(plain(batch["image"], batch["mask"]), batch).backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= 0.05 * parameter.grad
        wanted = plain.state_dict()
        apart = max(float((w - wanted[n]).abs().max()) for n, w in plain_weights(trainer).items())
        training = train_epochs(trainer, cell.data.open(cell, here))
        found[name] = prove(cell, here), apart, training.samples["held_out"]
    return found


@pytest.mark.parametrize(
    "kinds", [pytest.param(KINDS, id="fsdp"), pytest.param(MORE, id="more", marks=pytest.mark.full)]
)
def test_a_model_of_several_inputs_is_trained_as_by_a_reference_loop(
    kinds: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    cells = {name: chosen(*SGD, *TRAIN, *kind) for name, kind in kinds.items()}
    both = on_ranks(2, computed, next(iter(cells.values())), cells, folder=tmp_path)
    assert both[0].keys() == both[1].keys() == cells.keys()
    for found in both:
        for name, (proof, apart, kept) in found.items():
            assert proof < 1e-5, name
            assert apart < 1e-6, name
            assert len(kept["confidence"]) == len(kept["right"]) == 64, "each held-out image once"
            assert 0 < calibration_error(None, {"held_out": kept}) < 1


@pytest.mark.slow
def test_a_command_gives_a_table_weights_and_a_metric_of_the_held_out_images(
    tmp_path: Path,
) -> None:
    command = Command(tmp_path)
    metric = "{function:tests.user_modules.calibration_error,unit:share,label:ECE,better:lower}"
    done = command(*MASKED, *OWN_LOSS, *TRAIN, "resources.ranks_per_node=1",
                   "measurement=smoke", "measurement.measured_steps=2", "measurement.phase_steps=1",
                   f"++metric.columns.ece={metric}", quick=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = tmp_path.glob("results/*/cells/*/runs/*.json")
    record = json.loads(run.read_text(encoding="utf-8"))
    assert record["metrics"]["ece"] == calibration_error(None, record["samples"])
    [file] = tmp_path.glob("results/*/cells/*/attempts/*/weights.safetensors")
    model = Masked()
    model.load_state_dict(load_file(file))
    items = [entry(*MASKED).spec.data.call(training=False)[index] for index in range(64)]
    batch = {n: torch.stack([torch.as_tensor(i[n]) for i in items]) for n in items[0]}
    with torch.no_grad():
        right = model(batch["image"], batch["mask"])["logits"].argmax(-1) == batch["label"]
    assert float(right.float().mean()) == record["metrics"]["accuracy_top1"]


def test_without_a_loss_of_its_own_the_cross_entropy_reads_the_label(tmp_path: Path) -> None:
    cell = chosen(*SGD, "sharding=none", "resources.ranks_per_node=1", loss=())
    batch = masked_batch(16, 8, 0)
    loss = parallelize(first_model(cell), cell, one_rank()).loss(batch)
    outputs = first_model(cell)(batch["image"], batch["mask"])["logits"]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(outputs, batch["label"]))


def test_a_technique_that_changes_an_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = chosen(*SGD, "sharding=none", "resources.ranks_per_node=1")
    monkeypatch.setattr(
        "vitsweep.training.trainer.inputs_of",
        lambda module, batch: {"image": batch["image"], "mask": ~batch["mask"]},
    )
    with pytest.raises(WrongResultError):
        prove(cell, one_rank())


def test_what_does_not_fit_is_reported_before_anything_runs() -> None:
    for overrides, words in [
        (
            ("model.twin_batch=null",),
            "set `model.twin_batch=package.module.function`, a function of",
        ),
        (("data.native_resolution_px=16",), "`data.native_resolution_px` is the side of an image"),
        (("model.twin_batch=tests.user_data.nosuch",), "raised AttributeError with (num_images=2"),
        (("model.twin_batch=tests.user_data.stream",), "raised TypeError with (num_images=2"),
        (
            ("model.twin_batch=tests.user_data.half_a_batch",),
            "half_a_batch` gives mappings of `image`",
        ),
        (("data.label=class",), "`data.label=class` is none of the entries"),
        (("data.label=null", "objective.target=null"), "the cross entropy needs labels"),
        (
            ("data.num_classes=7", *TRAIN),
            "the accuracy from logits (2, 7), (batch, `data.num_classes`)",
        ),
        (("data.test_arguments=null", *TRAIN), "`++data.test_arguments.NAME=VALUE` give held-out"),
        (("data.label=null", *TRAIN), "the accuracy of `task=train` needs labels"),
        ((*TRAIN, "recipe.erase_probability=0.5"), "augments pairs of images and labels"),
        (
            ("data.target=tests.user_data.MapStyle", "data.label=null", "model.twin_batch=null"),
            "raised TypeError on images (2, 1, 8, 8)",
        ),
        (
            ("data.target=tests.user_data.MapStyle", "data.label=null"),
            "and `data.target=tests.user_data.MapStyle` gives pairs: leave it out",
        ),
        (("data.target=tests.user_data.WithText",), "gave item 0 the entry `name`, str 'a':"),
        (
            ("objective.target=tests.user_modules.by_image",),
            "by_image` returned a tensor (2,) of torch",
        ),
        ((*TRAIN, "task.held_out=tests.user_modules.nosuch"), "nosuch` cannot be imported (Attr"),
    ]:
        reasons = entry(*MASKED, *OWN_LOSS, *overrides).reasons
        assert any(words in reason for reason in reasons), reasons
        assert all(reason.endswith(".") for reason in reasons)
        if "the entry `name`" in words:
            assert len(reasons) == 1, "of what it holds besides nothing is known"
        if "is the side of an image" in words or "set `model.twin_batch=" in words:
            assert not any("Masked` raised" in reason for reason in reasons), (
                "which is not at fault"
            )


@pytest.mark.parametrize("loss", [OWN_LOSS, ()])
@pytest.mark.parametrize(
    ("overrides", "typed"),
    [
        (("pipeline_parallel=gpipe", "mesh.pipeline=2"), "pipeline_parallel=gpipe"),
        (("precision=fp8", "precision.emulate=true"), "precision=fp8"),
    ],
)  # fmt: skip
def test_pipelines_and_float8_are_refused_by_name(
    loss: tuple[str, ...], overrides: tuple[str, ...], typed: str
) -> None:
    reasons = entry(*MASKED, *loss, *overrides).reasons
    assert any(reason.startswith(f"`{typed}` ") for reason in reasons)


def test_vitsweeps_own_models_take_no_mappings() -> None:
    reasons = entry(*DATA, "model=vit_nano", "batch.images_per_step=16").reasons
    assert any({"`model=vit_nano`", "`model=module`"} <= named(reason) for reason in reasons)


@NEEDS_APPLY
def test_apply_predicts_from_a_mapping() -> None:
    model = Masked()
    batch = masked_batch(4, 8, 0)
    wanted = model(batch["image"], batch["mask"])["logits"].detach()
    overrides = ["resources.threads_per_rank=1", "sharding=none"]
    with vitsweep.apply(overrides, model, class_and_size) as applied:
        torch.testing.assert_close(applied.predict(batch)["logits"], wanted)
        applied.step(batch)
