"""Activations on the host: equal gradients however late copies are, few of them on the device."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cells import GPU_NODE, entry
from tests.choices import choice
from tests.shapes import NANO, assert_equal_step, build, replace
from vitsweep.techniques.memory import offloaded_blocks
from vitsweep.techniques.memory.offloaded_blocks import BlockSaves

DEEP = replace(NANO, depth=5)


def offloaded(model: nn.Module) -> nn.Module:
    return choice("memory", "offload_activations").apply(model)


class LateLane:
    """A stream that copies only when something waits for it; a source that is gone by then is a fault."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[tuple[Tensor, Any]] = []

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]]) -> int:
        for target, source in copies:
            target.fill_(torch.nan)
            self._queue.append((target, weakref.ref(source)))
        return len(self._queue)

    def wait(self, event: int | None) -> None:
        for place in range(event or 0):
            if self._queue[place] is not None:
                target, source = self._queue[place]
                assert source() is not None, "freed before it was copied"
                target.copy_(source())
                self._queue[place] = None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_blocks, "CopyLane", LateLane)


def passes(model: nn.Module) -> list[BlockSaves]:
    """What the blocks saved in the latest forward pass, the last block first."""
    found, saves = [], model.blocks[0].offloading._latest()
    while saves is not None:
        found.append(saves)
        saves = saves.earlier
    return found


@pytest.mark.usefixtures("late")
def test_gradients_are_equal_where_every_copy_is_as_late_as_it_may_be() -> None:
    assert_equal_step(offloaded, spec=DEEP)


def test_two_blocks_have_their_activations_on_the_device() -> None:
    model = offloaded(build(DEEP))
    output = model(torch.randn(3, 3, 8, 8, dtype=torch.float64))
    states = [
        {(s.on_device is not None, s.on_host is not None) for s in each.tensors()}
        for each in passes(model)
    ]
    last, sent, away = {(True, False)}, {(True, True)}, {(False, True)}
    assert states == [last, sent, away, away, away]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for each in passes(model):
        for saved in each.tensors():
            kept = saved.on_device if saved.on_host is None else saved.on_host
            assert kept.untyped_storage().data_ptr() not in weights
    output.sum().backward()
    assert passes(model) == [], "nothing is held between steps"


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("backwards", ["in order", "last first"])
def test_passes_of_several_micro_batches_may_be_open(backwards: str) -> None:
    images = torch.randn(2, 3, 3, 8, 8, dtype=torch.float64)
    gradients = []
    for model in (build(DEEP), offloaded(build(DEEP))):
        losses = [model(each).square().sum() for each in images]
        for loss in losses if backwards == "in order" else reversed(losses):
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("late")
def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    model = offloaded(build(DEEP))
    loss = model(torch.randn(3, 3, 8, 8, dtype=torch.float64)).square().sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), first, rtol=0, atol=0)


def test_without_gradients_nothing_is_saved() -> None:
    model = offloaded(build())
    with torch.no_grad():
        model(torch.randn(3, 3, 8, 8, dtype=torch.float64))
    assert model.blocks[0].offloading._latest is None


@pytest.mark.full
def test_activations_of_a_gpu_are_predicted_not_to_grow_with_the_depth() -> None:
    """The fake device has no streams: the order of copies and frees is that of the code."""
    trace_cell = pytest.importorskip("vitsweep.extras.predict.trace").trace_cell

    def activations(depth: int, memory: str) -> int:
        planned = entry(
            "model=vit_tiny", f"model.depth={depth}", "data=synthetic", f"memory={memory}",
            "sharding=none", "resources.ranks_per_node=1", "batch.images_per_step=32",
            machine=GPU_NODE,
        )  # fmt: skip
        assert not planned.reasons
        return trace_cell(planned.spec).memory.activations

    shallow, deep = (activations(depth, "offload_activations") for depth in (4, 8))
    assert deep == pytest.approx(shallow, rel=0.02)
    assert deep < 0.5 * activations(8, "keep_all")
