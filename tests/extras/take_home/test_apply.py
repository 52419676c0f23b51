"""A cell applied to a model in a loop of one's own trains as the product does."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import vitsweep
from tests.cells import TINY, entry
from tests.command import ROOT, Command
from tests.documents import blocks
from tests.ranks import on_ranks, placed
from tests.refusals import named
from tests.user_modules import Stack
from vitsweep.model.build import build_model, first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import plain_weights
from vitsweep.world import World

STEPS = 4
MODELS = (
    TINY,
    ("model=module", "model.target=tests.user_modules.build", "batch.images_per_step=16"),
)
KNOBS = {
    "precision": ("fp32", "bf16", "O1", "O2", "O3"),
    "sharding": ("ddp", "zero1", "zero2", "fsdp"),
    "optimizer": ("adamw_loop", "adamw_fused", "adamw_contiguous", "sgd_loop"),
    "memory": ("keep_all", "recompute_blocks", "recompute_selected"),
    "averaging": ("none", "ema"),
    "batch.accumulation_steps": ("1", "2"),
    "optimizer.clip_norm": ("null", "0.1"),
}  # fmt: skip
CORE = (
    ("sharding=fsdp", "precision=O2", "precision.half_dtype=float16", "averaging=ema"),
    ("sharding=zero1", "precision=O2", "batch.accumulation_steps=2", "optimizer.clip_norm=0.1"),
    ("sharding=ddp", "precision=O1", "optimizer=adamw_fused", "memory=recompute_blocks"),
    ("sharding=fsdp", "precision=fp32", "batch.accumulation_steps=2"),
)


def core(ranks: int) -> list[CellSpec]:
    return [_cell(MODELS[number % 2], choice, ranks) for number, choice in enumerate(CORE)]


def drawn(ranks: int, count: int) -> list[CellSpec]:
    rng, found = random.Random(ranks), []
    while len(found) < count:
        choice = tuple(f"{knob}={rng.choice(values)}" for knob, values in KNOBS.items())
        model = rng.choice(MODELS)
        if not _entry(model, choice, ranks).reasons:
            found.append(_cell(model, choice, ranks))
    return found


def _entry(model: tuple[str, ...], choice: tuple[str, ...], ranks: int) -> Any:
    size = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1")
    return entry(*model, *size, *choice)


def _cell(model: tuple[str, ...], choice: tuple[str, ...], ranks: int) -> CellSpec:
    spec: CellSpec = _entry(model, choice, ranks).spec
    return spec


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


class StopsOnce:
    """A loss that is interrupted in the last micro-batch of the first step."""

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return cross_entropy(outputs, batch)


def whole_batch(parts: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(part.values() for part in parts), strict=True)
    return torch.cat(images), torch.cat(labels)


def own_model(cell: CellSpec, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(cell)


def trained_both_ways(world: World, cells: list[CellSpec]) -> list[str]:
    """Return in words where a loop of one's own differs from the product's."""
    return [fault for cell in cells for fault in _differences(placed(world, cell), cell)]


def _differences(world: World, cell: CellSpec) -> list[str]:
    cell = replace(cell, task=replace(cell.task, label_smoothing=0.0))
    shares = [my_share(cell, global_batch(cell, step, world), world) for step in range(STEPS)]
    product = parallelize(first_model(cell), cell, world)
    wanted = [float(product.step(iter(share))) for share in shares]
    interrupted = StopsOnce(cell.batch.accumulation_steps)
    with vitsweep.apply(cell, own_model(cell, cell.seed), interrupted) as applied:
        with pytest.raises(KeyboardInterrupt):
            applied.step(whole_batch(shares[0]))
        losses = [float(applied.step(whole_batch(share))) for share in shares[:2]]
        state, wrapped = applied.state_dict(), applied
    with vitsweep.apply(cell, own_model(cell, 99), cross_entropy) as applied:
        applied.load_state_dict(state)
        losses += [float(applied.step(whole_batch(share))) for share in shares[2:]]
        found, names = applied.weights(), plain_weights(product)
        with applied.averaged(), product.averaged_weights():
            found |= {f"average of {n}": w for n, w in applied.weights().items()}
            names |= {f"average of {n}": w for n, w in plain_weights(product).items()}
    assert wrapped.optimizer is not applied.optimizer
    faults = [f"losses {losses} are not {wanted}"] if losses != wanted else []
    faults += [f"weight {n}" for n, w in names.items() if not torch.equal(w, found[n])]
    faults += ["other names"] if found.keys() != names.keys() else []
    averages = (t.average.averages if t.average else [] for t in (product, applied.trainer))
    faults += ["averages" for a, b in zip(*averages, strict=True) if not torch.equal(a, b)]
    return [f"{fault}: { {g: t.name for g, t in cell.techniques.items()} }" for fault in faults]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_ones_own_trains_as_the_product_and_goes_on_from_its_state(
    ranks: int, tmp_path: Path
) -> None:
    cells = core(ranks)
    for found in on_ranks(ranks, trained_both_ways, cells[0], cells, folder=tmp_path):
        assert not found


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_drawn_cells_do(ranks: int, tmp_path: Path) -> None:
    cells = drawn(ranks, 20)
    for found in on_ranks(ranks, trained_both_ways, cells[0], cells, folder=tmp_path):
        assert not found


class Named(Stack):
    """Takes its images by name and returns logits by name."""

    def forward(self, pixels: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return {"logits": super().forward(pixels) * scale}


def of_a_mapping(outputs: Any, batch: Any) -> Tensor:
    return F.mse_loss(outputs["logits"], batch["wanted"])


ALONE = ["resources.threads_per_rank=1", "optimizer=sgd_loop", "optimizer.learning_rate=0.1",
         "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.clip_norm=null"]  # fmt: skip


@pytest.mark.parametrize("with_count", [False, True])
def test_a_last_batch_that_does_not_divide_is_weighed(*, with_count: bool) -> None:
    """Its parts differ by an image; a loss that names a count weighs by that."""
    images, labels = torch.randn(8, 1, 8, 8), torch.tensor([1, 2, -100, 3, -100, -100, -100, 4])
    losses: dict[str, Any] = {"loss": cross_entropy}
    if with_count:
        losses = {"loss": lambda outputs, batch: F.cross_entropy(outputs, batch[1], reduction="sum"),
                  "loss_count": lambda batch: (batch[1] != -100).sum()}  # fmt: skip
    else:
        labels = labels.clamp(min=0)
    torch.manual_seed(0)
    model, plain = Stack(1, 10, 16, 2), Stack(1, 10, 16, 2)
    plain.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    with vitsweep.apply([*ALONE, "batch.accumulation_steps=3"], model, **losses) as applied:
        for length in (6, 8, 7):
            batch = images[:length], labels[:length]
            loss = cross_entropy(plain(batch[0]), batch)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            assert float(applied.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-6)
        found = applied.weights()
    for name, weight in plain.state_dict().items():
        assert torch.allclose(found[name], weight, atol=1e-6), name


def test_what_takes_batches_of_one_length_refuses_another() -> None:
    cell: Any = ["precision=fp8", "precision.emulate=true", "precision.layers=all",
                 "batch.accumulation_steps=2"]  # fmt: skip
    torch.manual_seed(0)
    images, labels = torch.randn(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64)
    model = build_model(entry(*cell, "resources.ranks_per_node=1").spec)
    with vitsweep.apply(cell, model) as applied:
        with pytest.raises(
            vitsweep.VitsweepError, match=r"63 images, and `precision=fp8`.*drop_last"
        ):
            applied.step((images[:63], labels[:63]))
        applied.step((images, labels))
        with pytest.raises(vitsweep.VitsweepError, match=r"32 images.* 64\b.*drop_last"):
            applied.step((images[:32], labels[:32]))


def test_a_count_without_its_loss_and_one_that_is_no_number_are_refused() -> None:
    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(vitsweep.BadValueError, match=r"`loss_count`.*`loss`"):
        vitsweep.apply(ALONE, Stack(1, 10, 16, 2), loss_count=len)
    with (
        vitsweep.apply(
            ALONE, Stack(1, 10, 16, 2), cross_entropy, loss_count=lambda batch: batch[1]
        ) as applied,
        pytest.raises(vitsweep.VitsweepError, match=r"a tensor \(4,\)"),
    ):
        applied.step(batch)


@pytest.mark.parametrize(
    ("cell", "model", "loss", "words"),
    [
        ("", "vit", None, "`model` is str"),
        ("", Stack(1, 10, 16, 2), "ce", "`loss='ce'` is no function"),
        ("precision=O1,O2", Stack(1, 10, 16, 2), None, "`precision=O1,O2` has several values"),
        ("precision=O1 precision=fp32", Stack(1, 10, 16, 2), None, "set the same key"),
        ("resources.ranks_per_node=2", Stack(1, 10, 16, 2), None, "for 2 ranks .* there are 1"),
        ("recipe.clip_norm=0.001", Stack(1, 10, 16, 2), None, "no effect with `task=measure`"),
        ({"cell_id": "x"}, Stack(1, 10, 16, 2), None, "no `sweep`"),
    ],
)
def test_what_is_no_cell_no_model_and_no_loss_is_refused(
    cell: Any, model: Any, loss: Any, words: str
) -> None:
    with pytest.raises(vitsweep.VitsweepError, match=words):
        vitsweep.apply(cell, model, loss)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "The batch is NoneType"),
        (torch.randn(4, 1, 8, 8), r"The batch is a tensor \(4, 1, 8, 8\)"),
        (
            (np.ones((4, 1, 8, 8)), torch.zeros(4, dtype=torch.int64)),
            "holds ndarray where a tensor",
        ),
        ((), "holds NoneType where a tensor"),
        ((torch.randn(4, 1, 8, 8), torch.rand(4)), r"labels are a tensor \(4,\) of torch\.float32"),
        ((torch.randn(4, 1, 8, 8), torch.ones(4).long(), torch.ones(4)), "two entries .* not 3"),
        ((torch.randn(4, 1, 8, 8),), "two entries .* not 1"),
    ],
)
def test_a_batch_that_is_no_pair_of_inputs_and_labels_is_refused(batch: Any, words: str) -> None:
    with (
        vitsweep.apply(ALONE, Stack(1, 10, 16, 2)) as applied,
        pytest.raises(vitsweep.VitsweepError, match=words),
    ):
        applied.step(batch)


def test_a_loss_without_gradient_is_refused() -> None:
    def constant(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.detach().mean()

    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with (
        vitsweep.apply(ALONE, Stack(1, 10, 16, 2), constant) as applied,
        pytest.raises(vitsweep.VitsweepError, match="no gradient"),
    ):
        applied.step(batch)


def test_settings_that_belong_to_the_loop_are_named() -> None:
    idle = {"batch.images_per_step": 64, "model.depth": 77, "sweep.minutes": 3}
    with (
        pytest.warns(UserWarning, match="`batch.*`, `model.depth=77`, `sweep.* has no effect"),
        vitsweep.apply({"precision": "fp32", **idle}, Stack(1, 10, 16, 2)) as applied,
    ):
        assert applied.cell.precision.name == "fp32"


def test_a_cell_that_trains_brings_the_optimizer_and_smoothing_of_its_recipe() -> None:
    typed = "task=train recipe=digits recipe.weight_decay=0.25 data=digits"
    with vitsweep.apply(typed, Stack(1, 10, 16, 2)) as applied:
        groups = applied.optimizer.param_groups
        assert {group["lr"] for group in groups} == {0.003}
        assert {group["weight_decay"] for group in groups} == {0.0, 0.25}
        assert applied.cell.optimizer.clip_norm == 1.0
        batch = torch.randn(4, 1, 8, 8), torch.arange(4)
        wanted = F.cross_entropy(applied.predict(batch[0]), batch[1], label_smoothing=0.1)
        torch.testing.assert_close(applied.step(batch), wanted, check_dtype=False)


def test_a_loss_with_an_axis_is_asked_to_return_the_sum_with_a_count_and_else_the_mean() -> None:
    def each(outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], reduction="none")

    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    for kind, given in ("mean", {}), ("sum", {"loss_count": lambda batch: np.int64(len(batch[1]))}):
        with (
            vitsweep.apply(ALONE, Stack(1, 10, 16, 2), each, **given) as applied,
            pytest.raises(vitsweep.VitsweepError, match=rf"the {kind} over .*`loss\.{kind}\(\)`"),
        ):
            applied.step(batch)


def test_batches_by_name_and_an_own_loss_equal_a_reference_loop() -> None:
    torch.manual_seed(0)
    model, plain = Named(1, 10, 16, 2), Named(1, 10, 16, 2)
    plain.load_state_dict(model.state_dict())
    batch = {
        "pixels": torch.randn(8, 1, 8, 8),
        "wanted": torch.randn(8, 10),
        "unread": torch.ones(8),
    }
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    with vitsweep.apply(
        [*ALONE, "batch.accumulation_steps=2", "sharding=ddp"], model, of_a_mapping
    ) as applied:
        for _ in range(2):
            loss = of_a_mapping(plain(batch["pixels"]), batch)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            assert float(applied.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-6)
        found = applied.weights()
    Named(1, 10, 16, 2).load_state_dict(found)
    for name, weight in plain.state_dict().items():
        assert torch.allclose(found[name], weight, atol=1e-6), name
    with pytest.raises(vitsweep.VitsweepError, match="was closed"):
        applied.step(batch)
    assert not torch.distributed.is_initialized()


def test_predictions_draw_nothing_and_leave_each_module_in_its_mode() -> None:
    torch.manual_seed(0)
    model = Stack(1, 10, 16, 2)
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    model.stem.eval()
    images = torch.randn(8, 1, 8, 8)
    with vitsweep.apply(ALONE, model) as applied:
        before = [module.training for module in applied.model.modules()]
        assert torch.equal(applied.predict(images), applied.predict(images))
        assert [module.training for module in applied.model.modules()] == before
        assert len(set(before)) == 2


def test_within_averaged_weights_nothing_is_trained_or_saved() -> None:
    batch = (torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))
    with vitsweep.apply([*ALONE, "averaging=ema"], Stack(1, 10, 16, 2)) as applied:
        applied.step(batch)
        live = applied.weights()
        with applied.averaged():
            for call in (lambda: applied.step(batch), applied.state_dict, applied.averaged):
                with pytest.raises(vitsweep.VitsweepError, match="inside of `with averaged"):
                    call()
        assert all(torch.equal(weight, live[name]) for name, weight in applied.weights().items())


def test_flags_follow_the_cell_that_steps_and_return_when_the_last_is_closed() -> None:
    def flags() -> tuple[str, int]:
        return torch.get_float32_matmul_precision(), torch.get_num_threads()

    batch, threads = (torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)), flags()[1]
    torch.set_float32_matmul_precision("medium")
    two = ["resources.threads_per_rank=2", *ALONE[1:]]
    first, second = (vitsweep.apply(cell, Stack(1, 10, 16, 2)) for cell in (ALONE, two))
    seen = []
    for applied in (first, second, first):
        applied.step(batch)
        seen.append(flags())
    assert seen == [("highest", 1), ("highest", 2), ("highest", 1)]
    first.close()
    second.step(batch)
    assert flags() == ("highest", 2)
    second.close()
    assert flags() == ("medium", threads)
    with torch.backends.cudnn.flags(enabled=False):  # reads all of them
        assert torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("overrides", "loss", "words"),
    [
        (["tensor_parallel=megatron"], None, "use `tensor_parallel=none`"),
        (["classifier=pooled"], None, "use `classifier=token`"),
        (["objective=masked_autoencoder"], None, "`objective=masked_autoencoder`"),
        (["precision=fp8", "precision.emulate=true"], cross_entropy, "use `precision=O1`"),
        (
            ["precision=O1", "sharding=fsdp", "resources.ranks_per_node=2"],
            None,
            "`precision=O1 sharding=fsdp`",
        ),
    ],
)
def test_what_a_technique_does_not_find_is_reported(
    overrides: list[str], loss: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "resources" in overrides[-1]:
        cell: Any = entry("batch.images_per_step=16", *overrides).spec
    else:
        cell = overrides
    with pytest.raises(vitsweep.VitsweepError) as no:
        vitsweep.apply(cell, Stack(1, 10, 16, 2), loss)
    assert words in str(no.value)


def test_a_model_is_used_once_and_a_batch_has_an_image_for_each_part() -> None:
    model = Stack(1, 10, 16, 2)
    with vitsweep.apply([*ALONE, "batch.accumulation_steps=3"], model) as applied:
        with pytest.raises(vitsweep.VitsweepError, match=r"accumulation_steps=3.*drop_last=True"):
            applied.step((torch.randn(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)))
        with pytest.raises(vitsweep.VitsweepError, match="new model"):
            vitsweep.apply(ALONE, model)
        state = applied.state_dict()
    with (
        vitsweep.apply(ALONE, Stack(1, 10, 8, 2)) as other,
        pytest.raises(vitsweep.VitsweepError, match=r"`.*` of shape \("),
    ):
        other.load_state_dict(state)
    with (
        vitsweep.apply(ALONE, Stack(1, 10, 8, 2)) as other,
        pytest.raises(vitsweep.VitsweepError, match=r"`tensors`.*`state_dict`"),
    ):
        other.load_state_dict(other.model.state_dict())


@pytest.mark.parametrize("saved", [["optimizer=adamw_loop"], [*ALONE, "averaging=ema"]])
def test_a_state_with_more_than_the_cell_has_is_refused_and_changes_nothing(
    saved: list[str],
) -> None:
    batch = torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
    with vitsweep.apply(saved, Stack(1, 10, 16, 2)) as applied:
        applied.step(batch)
        state = applied.state_dict()
    torch.manual_seed(1)
    with vitsweep.apply(ALONE, Stack(1, 10, 16, 2)) as other:
        before = other.state_dict()["tensors"]
        with pytest.raises(vitsweep.VitsweepError, match=r"state holds `"):
            other.load_state_dict(state)
        after = other.state_dict()["tensors"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def apply_with_own_weights(world: World, cell: CellSpec) -> str:
    torch.manual_seed(world.rank)
    try:
        vitsweep.apply(cell, Stack(1, 10, 16, 2))
    except vitsweep.VitsweepError as error:
        return str(error)
    return "it was taken"


def train_on_a_label_of_no_class(world: World, cell: CellSpec) -> str:
    torch.manual_seed(0)
    labels = torch.full((8,), 9 + world.rank)
    with vitsweep.apply(cell, Stack(1, 10, 16, 2)) as applied:
        try:
            applied.step((torch.randn(8, 1, 8, 8), labels))
        except vitsweep.VitsweepError as error:
            return str(error)
    return "it was taken"


def test_what_one_rank_refuses_stops_all(tmp_path: Path) -> None:
    cell = _cell(MODELS[1], ("sharding=ddp",), 2)
    first, second = on_ranks(2, train_on_a_label_of_no_class, cell, cell, folder=tmp_path)
    assert "it was taken" not in (first, second)
    assert "10" not in named(first)
    assert "10" in named(second)


def test_weights_that_differ_between_ranks_are_refused_on_each(tmp_path: Path) -> None:
    cell = _cell(MODELS[1], ("sharding=fsdp",), 2)
    for found in on_ranks(2, apply_with_own_weights, cell, cell, folder=tmp_path):
        assert "`torch.manual_seed(0)`" in found


SCRIPT = """
import os, random, sys
from pathlib import Path
import torch
import vitsweep
from tests.user_modules import Stack
state = random.getstate()
row = {"sweep": "own", "cell_id": sys.argv[2]}
for name, cell in {"frozen": Path(sys.argv[1]), "row": row}.items():  # which joins torchrun's ranks anew
    torch.manual_seed(0)
    with vitsweep.apply(cell, Stack(1, 10, 16, 2)) as applied:
        generator = torch.Generator().manual_seed(applied.world.rank)
        for _ in range(2):
            images, labels = torch.randn(8, 1, 8, 8, generator=generator), torch.zeros(8, dtype=torch.int64)
            applied.step((images, labels))
        weights = applied.weights()
        if applied.world.rank == 0:
            torch.save(weights, f"{name}.pt")
    assert not torch.distributed.is_initialized()
assert random.getstate() == state  # though the first call imports what draws
os._exit(0)  # a thread of gloo that lets go of a tensor while the interpreter ends aborts the process
"""


@pytest.mark.slow
def test_under_torchrun_a_frozen_cell_and_a_row_of_its_table_train_alike(tmp_path: Path) -> None:
    found = entry("batch.images_per_step=16", "resources.ranks_per_node=2", "sharding=fsdp")
    frozen = tmp_path / "results" / "own" / "cells" / found.cell_id / "cell.yaml"
    frozen.parent.mkdir(parents=True)
    frozen.write_text(yaml.safe_dump({"cell": found.tree, "overrides": []}))
    (tmp_path / "loop.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
         "loop.py", str(frozen), found.cell_id],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    of_frozen, of_row = (torch.load(tmp_path / f"{name}.pt") for name in ("frozen", "row"))
    assert of_frozen
    assert all(torch.equal(weight, of_row[name]) for name, weight in of_frozen.items())


def under_torchrun(script: str, folder: Path) -> None:
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process.
    (folder / "page.py").write_text(f"{script}\nimport os\nos._exit(0)\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "page.py"],
        cwd=folder, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/examples/own_model"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def scripts_of_the_page() -> tuple[str, str, str]:
    first, loop, counted = (b.text for b in blocks("python") if b.page.name == "apply.md")
    return first, loop, counted


def test_the_scripts_of_the_page_run_under_torchrun(tmp_path: Path) -> None:
    first, _, counted = scripts_of_the_page()
    under_torchrun(f"{first}\n\n{counted}", tmp_path)


OF_READER = """
import torch, vitsweep
from own_model.models import build_model
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
epochs, learning_rate = 2, lambda epoch: 0.01 / (1 + epoch)
dataset = TensorDataset(torch.randn(2 * 35, 1, 8, 8), torch.randint(10, (2 * 35,)))
"""


@pytest.mark.slow
def test_the_loop_of_the_page_goes_past_the_end_of_its_first_epoch(tmp_path: Path) -> None:
    """Of 35 images of a rank the last batch has 3, which two micro-batches share."""
    done = Command(tmp_path)(
        *TINY, "-m", "optimizer=adamw_loop,adamw_fused", "sweep.name=first", "batch.accumulation_steps=2",
        "resources.ranks_per_node=2", "measurement.blocks=3", "measurement.prove=none",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    under_torchrun(OF_READER + scripts_of_the_page()[1], tmp_path)
    saved = [torch.load(tmp_path / f"checkpoint-{rank}.pt") for rank in range(2)]
    assert [state["step"] for state in saved] == [4, 4]


def test_a_file_of_somebody_else_names_no_class_of_its_own(tmp_path: Path) -> None:
    tree = entry("batch.images_per_step=16", "resources.ranks_per_node=1").tree
    tree["memory"]["_target_"] = "tests.user_techniques.Counts"
    path = tmp_path / "cell.yaml"
    path.write_text(yaml.safe_dump({"cell": tree}))
    with pytest.raises(vitsweep.VitsweepError, match=r"memory\._target_=tests"):
        vitsweep.apply(path, Stack(1, 10, 16, 2))
    with pytest.raises(vitsweep.BadValueError, match=r"user_techniques\.Counts\.conflicts"):
        vitsweep.apply(
            path, Stack(1, 10, 16, 2), trust=True
        )  # it is built, and its rules are asked
    with pytest.raises(vitsweep.VitsweepError, match="`trust=True`"):
        vitsweep.apply(path, Stack(1, 10, 16, 2))
    path.write_text("steps: 3")
    with pytest.raises(vitsweep.BadValueError, match=r"`cell\.yaml`"):
        vitsweep.apply(path, Stack(1, 10, 16, 2))
