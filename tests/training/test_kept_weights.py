"""The file of weights that a training leaves gives the recorded accuracy in plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cells import cell, entry
from tests.data.cells_and_worlds import world as one_rank
from tests.other_process import finished, other_process
from tests.ranks import on_ranks, placed
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.checkpoint_manager import AVERAGED_FILE, FILE, WeightKeeper
from vitsweep.training.epochs import train_epochs
from vitsweep.world import World

TRAINING = (
    "data=digits", "task=train", "recipe=digits", "batch.images_per_step=64", "task.epochs=2",
    "task.warmup_epochs=0.5", "optimizer=adamw_fused",
)  # fmt: skip


def trained(world: World, cells: dict[str, CellSpec], folder: Path) -> dict[str, Any]:
    """Train each cell; return the columns of what it kept."""
    found = {}
    for name, spec in cells.items():
        here = placed(world, spec)
        torch.manual_seed(spec.seed)
        trainer = parallelize(build_model(spec), spec, here)
        keeper = WeightKeeper(folder / name, spec.task.keep)
        training = train_epochs(trainer, spec.data.open(spec, here), keeper=keeper)
        found[name] = training.metrics
    return found


def accuracy(spec: CellSpec, file: Path) -> float:
    """Return the top-1 of a file's weights in the plain model, in float32."""
    model = build_model(spec).eval()
    weights = load_file(file)
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    right = []
    with torch.no_grad():
        for images, labels in spec.data.open(spec, one_rank()).test():
            right += (model(images).argmax(1) == labels).tolist()
    return sum(right) / len(right)


def plain_cell() -> CellSpec:
    return cell(*TRAINING, "resources.ranks_per_node=1", "sharding=none")


KINDS = {
    "ddp": ("sharding=ddp",),
    "fsdp": ("sharding=fsdp", "averaging=ema"),
    "zero1": ("sharding=zero1",),
}
MORE = {
    "zero1 O2": ("sharding=zero1", "precision=O2", "precision.half_dtype=bfloat16"),
    "fsdp contiguous": ("sharding=fsdp", "memory=recompute_blocks"),
    "megatron": ("tensor_parallel=megatron", "mesh.tensor=2"),
    "gpipe": ("pipeline_parallel=gpipe", "mesh.pipeline=2", "sharding=ddp"),
}


@pytest.mark.parametrize(
    "kinds", [pytest.param(KINDS, id="shardings"), pytest.param(MORE, id="more", marks=pytest.mark.full)]
)  # fmt: skip
def test_on_two_ranks_the_file_gives_the_recorded_accuracy(
    tmp_path: Path, kinds: dict[str, tuple[str, ...]]
) -> None:
    cells = {name: cell(*TRAINING, *kind) for name, kind in kinds.items()}
    [found, _] = on_ranks(2, trained, cells[next(iter(cells))], cells, tmp_path, folder=tmp_path)
    for name, spec in cells.items():
        metrics = found[name]
        assert metrics["accuracy_top1"] > 0.15, "better than chance"
        rounding = 0.02 if spec.precision.name == "O2" else 0.003
        kept = {FILE: metrics["accuracy_top1"]}
        if spec.averaging.name == "ema":
            kept = {FILE: metrics["accuracy_top1_raw"], AVERAGED_FILE: metrics["accuracy_top1"]}
        for file, wanted in kept.items():
            got = accuracy(plain_cell(), tmp_path / name / file)
            assert got == pytest.approx(wanted, abs=rounding), (name, file)


WITHOUT_VITSWEEP = """
import sys
sys.modules["vitsweep"] = None  # importing it raises
sys.path.insert(0, sys.argv[1])
import torch
from safetensors.torch import load_file
from user_modules import with_batch_norm

images, labels = torch.load(sys.argv[2])
for file in sys.argv[3:]:
    model = with_batch_norm().eval()
    model.load_state_dict(load_file(file))
    with torch.no_grad():
        print((model(images).argmax(1) == labels).double().mean().item())
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_pytorch_without_vitsweep_gets_the_recorded_accuracy(
    tmp_path: Path, ranks: int
) -> None:
    """Running statistics included, of which each rank has its own while it trains."""
    own = ("model=module", "model.target=tests.user_modules.with_batch_norm")
    kinds = ("ddp", "fsdp", "zero1")
    on = f"resources.ranks_per_node={ranks}"
    cells = {s: entry(*TRAINING, *own, f"sharding={s}", on).spec for s in kinds}
    [found, *_] = on_ranks(ranks, trained, cells["ddp"], cells, tmp_path, folder=tmp_path)
    batches = list(cells["ddp"].data.open(plain_cell(), one_rank()).test())
    held_out = tuple(map(torch.cat, zip(*batches, strict=True)))
    torch.save(held_out, tmp_path / "held_out")
    files = [tmp_path / kind / FILE for kind in kinds]
    modules = Path(__file__).parents[1]
    process = other_process(WITHOUT_VITSWEEP, modules, tmp_path / "held_out", *files)
    got = map(float, finished(process).split())
    assert list(got) == pytest.approx([found[kind]["accuracy_top1"] for kind in kinds], abs=1e-9)
    assert min(found[kind]["accuracy_top1"] for kind in kinds) > 0.15, "better than chance"


def test_tied_weights_are_in_the_file_under_each_name(tmp_path: Path) -> None:
    alone = ("resources.ranks_per_node=1", "sharding=none")
    spec = entry(
        *TRAINING, *alone, "model=module", "model.target=tests.user_modules.with_ties"
    ).spec
    trained(one_rank(), {"ties": spec}, tmp_path)
    model = build_model(spec)
    model.load_state_dict(load_file(tmp_path / "ties" / FILE))
    assert model.layers[1].module.weight is model.layers[0].module.weight
