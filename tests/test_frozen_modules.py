"""Modules that are frozen in odd ways come back as they were from whatever looks at them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.parametrizations import weight_norm

import vitsweep
from tests.cells import entry
from tests.data.cells_and_worlds import world as lone_world
from tests.extras import NEEDS_APPLY
from tests.ranks import on_ranks
from tests.user_modules import Residual
from vitsweep import extras
from vitsweep.model import user_module
from vitsweep.model.build import first_model
from vitsweep.model.module_look import set_to_train
from vitsweep.model.user_module import counted, problems, without_weights
from vitsweep.parallelize import parallelize
from vitsweep.proof.prove import proof_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import evaluate, held_out, train_epochs
from vitsweep.training.shards import plain_weights
from vitsweep.training.trainer import Trainer, unwrapped
from vitsweep.world import World


class Net(nn.Module):
    """Images (B, 1, 8, 8) -> logits (B, 10), with a stem of a convolution, a norm and dropout."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2, **norm)})
        self.layers = nn.ModuleList(Residual(72) for _ in range(2))
        self.drop, self.norm, self.head = nn.Dropout(0.5), nn.BatchNorm1d(72), nn.Linear(72, 10)
        self.drop.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem["norm"](self.stem["conv"](images)).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(self.norm(x)))


def eval_in_the_constructor() -> nn.Module:
    net = Net()
    net.stem.eval()
    return net


class TrainOverridden(Net):
    def train(self, mode: bool = True) -> "TrainOverridden":
        super().train(mode)
        self.stem.eval()
        return self


def no_gradients() -> nn.Module:
    net = Net()
    net.stem.eval().requires_grad_(False)
    return net


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()), persistent=False)
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("nothing", None)

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        return super().forward(images) * (1 + 0.01 * (self.calls + self.replaced))


def nested_modes() -> nn.Module:
    net = Net()
    net.stem.eval()
    net.stem["norm"].train()
    return net


def parametrized() -> nn.Module:
    net = Net()
    weight_norm(net.stem["conv"])
    net.stem.eval()
    return net


def cumulative() -> nn.Module:
    net = Net(momentum=None)
    net.norm.eval()
    return net


def no_statistics() -> nn.Module:
    net = Net(track_running_stats=False)
    net.stem.eval()
    return net


def shared() -> nn.Module:
    net = Net()
    net.stem["again"] = net.stem["norm"].eval()
    return net


def frozen_by_a_hook() -> nn.Module:
    net = Net()
    net.register_forward_pre_hook(_freeze)
    return net


def _freeze(net: nn.Module, inputs: Any) -> None:
    net.stem.eval()


class Unfreezes(Net):
    """Its mode decides which parameters need gradients."""

    def train(self, mode: bool = True) -> "Unfreezes":
        super().train(mode)
        self.head.requires_grad_(mode)
        return self


class Merges(Net):
    """Merges a factor into its weights for evaluation, and takes it out for training, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False

    def train(self, mode: bool = True) -> "Merges":
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.head.bias *= 0.5 if mode else 2.0
            self.merged = not mode
        return self

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + (0.0 if self.merged else self.head.bias)


def wholly_in_evaluation() -> nn.Module:
    return Net().eval()


class Draws(Net):
    """Draws from every generator, in evaluation as well."""

    def forward(self, images: Tensor) -> Tensor:
        noise = random.random() + np.random.random()
        return super().forward(images) + dropout(torch.ones(10), 0.5) * noise


PARAMETRIZED = {f"stem.conv.parametrizations{of}" for of in ("", ".weight", ".weight.0")}
FROZEN: dict[str, set[str]] = {
    "eval_in_the_constructor": {"stem", "stem.conv", "stem.norm", "drop"},
    "TrainOverridden": {"stem", "stem.conv", "stem.norm", "drop"},
    "no_gradients": {"stem", "stem.conv", "stem.norm", "drop"},
    "Counts": {"drop"},
    "nested_modes": {"stem", "stem.conv", "drop"},
    "parametrized": {"stem", "stem.conv", "stem.norm", "drop", *PARAMETRIZED},
    "cumulative": {"norm", "drop"},
    "no_statistics": {"stem", "stem.conv", "stem.norm", "drop"},
    "shared": {"stem.norm", "drop"},
    "frozen_by_a_hook": {"drop"},
    "Unfreezes": {"drop"},
    "Merges": {"drop"},
    "wholly_in_evaluation": set(),
    "Draws": {"drop"},
}
"""Factory -> parts of its module that are in evaluation mode in training."""
UNPROVED = {"Draws", "wholly_in_evaluation"}
"""What draws in training has no proof."""
ALONE = ("resources.ranks_per_node=1", "sharding=none")


@cache
def planned(name: str, *overrides: str) -> CellSpec:
    found = entry(
        "model=module", f"model.target={__name__}.{name}", "batch.images_per_step=256",
        "resources.threads_per_rank=1", "measurement.prove=none", *overrides,
    )  # fmt: skip
    assert not found.reasons, (name, found.reasons)
    return found.spec


def drawn() -> tuple[Any, ...]:
    """States of what the whole process has."""
    array = np.random.get_state()
    flags = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )
    return random.getstate(), str(array), torch.get_rng_state().tolist(), flags


def held(module: nn.Module) -> dict[str, Any]:
    """Modes, weights, buffers and their objects."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    modes = {name: part.training for name, part in module.named_modules()}
    objects = {name: (id(t), t.requires_grad) for name, t in tensors.items()}
    values = {name: t.detach().tolist() for name, t in tensors.items()}
    return {"modes": modes, "objects": objects, "values": values}


@contextmanager
def untouched(name: str, module: nn.Module | None = None) -> Iterator[None]:
    before = drawn(), held(module) if module else None
    yield
    assert drawn() == before[0], name
    assert (held(module) if module else None) == before[1], name


def kept(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    """What `task.held_out` keeps; it draws."""
    return {"noise": torch.rand(len(outputs)) + random.random()}


def frozen_parts(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if not part.training}


def test_evaluation_leaves_a_module_as_it_was() -> None:
    for name in FROZEN:
        spec = planned(name, *ALONE)
        trainer = parallelize(first_model(spec), spec, lone_world())
        assert frozen_parts(trainer.model) == FROZEN[name]
        batches = spec.data.open(spec, lone_world())
        for _ in range(2):
            trainer.step(batches.train(0))
            with untouched(name, trainer.model):
                evaluate(trainer, batches, 1, 0.0)
                held_out(trainer, batches, f"{__name__}.kept")


def trained(spec: CellSpec, here: World, every: int) -> Trainer:
    spec = replace(spec, task=replace(spec.task, evaluate_every_epochs=every))
    trainer = parallelize(first_model(spec), spec, here)
    train_epochs(trainer, spec.data.open(spec, here))
    return trainer


TRAIN = ("task=train", "task.epochs=6", "task.warmup_epochs=1", "task.keep=none")


def test_how_often_it_is_evaluated_changes_no_training() -> None:
    for name in sorted(FROZEN.keys() - {"no_gradients", "nested_modes", "shared"}):
        spec = planned(name, *ALONE, *TRAIN)
        first, *others = (held(trained(spec, lone_world(), every).model) for every in (0, 1, 3))
        for other in others:
            assert other["modes"] == first["modes"]
            assert other["values"] == first["values"]
        if "stem.norm" in FROZEN[name] and name != "no_statistics":
            assert first["values"]["stem.norm.running_mean"] == [0.0, 0.0]
        if name != "cumulative":
            assert any(first["values"]["norm.running_mean"])


def buffers_of_both(world: World, spec: CellSpec) -> list[dict[str, Any]]:
    found = []
    for every in (0, 1):
        trainer = trained(spec, world, every)
        buffers = {name: b.tolist() for name, b in unwrapped(trainer.model).named_buffers()}
        weights = {name: w.tolist() for name, w in plain_weights(trainer).items()}
        found.append({"buffers": buffers, "weights": weights})
    return found


def test_evaluation_leaves_the_statistics_of_each_replica_of_a_sharded_model(
    tmp_path: Path,
) -> None:
    spec = planned("eval_in_the_constructor", "resources.ranks_per_node=2", "sharding=fsdp", *TRAIN)
    ranks = on_ranks(2, buffers_of_both, spec, spec, folder=tmp_path)
    for never, always in ranks:
        assert never == always
    assert ranks[0][0]["buffers"] != ranks[1][0]["buffers"], "of images of their own"


@pytest.mark.parametrize("name", FROZEN)
def test_what_looks_proves_traces_counts_and_exports_leaves_the_process_as_it_was(
    name: str,
    tmp_path: Path,
) -> None:
    spec, here = planned(name, *ALONE), lone_world()
    looks: dict[str, Callable[[], object]] = {
        "problems": lambda: problems(spec.model, spec),  # type: ignore[arg-type]
        "problems without a run": lambda: problems(spec.model, spec, run=False),  # type: ignore[arg-type]
        "counted": lambda: counted(spec.model, 8),  # type: ignore[arg-type]
    }
    if "predict" in extras.FEATURES:
        looks["traced"] = lambda: extras.load("predict.trace:trace_cell")(spec)
    if "take_home" in extras.FEATURES:
        written, prepare = map(extras.load, ("take_home.write:written", "take_home.prove:_prepare"))
        looks["exported"] = lambda: written(spec, "train.py", [])
        looks["prepared for the proof of a file"] = lambda: prepare(tmp_path / "twin", spec)
    if name not in UNPROVED:
        looks["proved"] = lambda: proof_of(spec, here)
    for what, look in looks.items():
        user_module._LOOKS.clear()
        user_module._COUNTED.clear()
        with untouched(f"{name}, {what}"):
            look()


def test_an_exported_file_trains_the_parts_that_the_cell_trains() -> None:
    for name in FROZEN:
        write = pytest.importorskip("vitsweep.extras.take_home.write")
        spec = planned(name, *ALONE)
        text: dict[str, Any] = {"__name__": "exported"}
        exec(write.written(spec, "train.py", []), text)
        assert frozen_parts(text["build_model"]()) == FROZEN[name]
        assert frozen_parts(without_weights(spec.model, 8)) == FROZEN[name]  # type: ignore[arg-type]


@NEEDS_APPLY
@pytest.mark.filterwarnings("ignore:.*cannot be run on this batch without values")
def test_a_prediction_leaves_the_model_of_a_loop_as_it_was() -> None:
    for name in FROZEN:
        torch.manual_seed(0)
        model: nn.Module = globals()[name]()
        set_to_train(model)
        images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
        if name == "Unfreezes":
            model.head.bias.requires_grad_(False)
        with vitsweep.apply([*ALONE, "precision=fp32"], model) as applied:
            for _ in range(2):
                with untouched(name, model):
                    first, again = applied.predict(images), applied.predict(images)
                assert torch.equal(first, again) == (name != "Draws")
                modes = held(model)["modes"]
                applied.step((images, labels))
                assert held(model)["modes"] == modes or name == "frozen_by_a_hook"
