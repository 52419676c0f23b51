"""Time by module: forward passes by their ranges, backward passes by the numbers of autograd."""

import time
from collections import defaultdict
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cells import cell
from tests.extras.explain.test_step_trace import event, phase_end, step_mark
from vitsweep.extras.explain.kernel_kinds import Event
from vitsweep.extras.explain.module_trace import (
    BETWEEN,
    COMMUNICATION,
    MODULE,
    module_rows,
    naming_modules,
    units_of,
)
from vitsweep.extras.explain.step_trace import TraceMarks, record_steps
from vitsweep.model.build import first_model

NAP_MS = 20.0


def by_module(events: list[Event], steps: int = 1) -> dict[str, float]:
    """Milliseconds by module over the last steps."""
    found: defaultdict[str, float] = defaultdict(float)
    for _, module, ms in module_rows(events, steps):
        found[module] += ms
    return {module: round(ms, 6) for module, ms in found.items()}


def forward(module: str, start: float, end: float) -> Event:
    return event(MODULE + module, start, end, is_range=True)


def test_backward_passes_belong_to_the_module_of_their_operators() -> None:
    trace = [
        step_mark(0),
        forward("a", 1, 4),
        event("aten::mm", 1, 3, sequence=7),
        forward("b", 4, 5),
        event("aten::mul", 4, 5, sequence=8),
        phase_end("forward", 6),
        event("MulBackward0", 6, 8, is_node=True, sequence=8),
        event("MmBackward0", 9, 13, is_node=True, sequence=7),
        phase_end("backward", 14),
        phase_end("optimizer", 19),
        step_mark(20),
    ]
    assert by_module(trace) == {
        "(forward)": 2, "a": 7, "b": 3, "(backward)": 2, "(optimizer)": 5, BETWEEN: 1
    }  # fmt: skip


def test_what_a_module_recomputes_in_the_backward_pass_is_its_own() -> None:
    trace = [
        step_mark(0),
        forward("a", 0, 2),
        event("aten::mm", 0, 2, sequence=1),
        phase_end("forward", 2),
        event("CheckpointBackward", 2, 9, is_node=True, sequence=99),
        forward("a", 3, 5),
        event("aten::mm", 3, 5, sequence=4),
        event("MmBackward0", 5, 8, is_node=True, sequence=4),
        phase_end("backward", 10),
        step_mark(10),
    ]
    assert by_module(trace) == {"a": 7, "(backward)": 3}


def test_kernels_belong_to_the_module_that_launched_them_and_come_before_collectives() -> None:
    trace = [
        step_mark(0),
        forward("a", 0, 1),
        event("aten::mm", 0, 1, sequence=1, id=5),
        event("aten::mul", 1, 2, sequence=2, id=6),
        phase_end("forward", 2),
        event("gemm", 2, 6, on_device=True, id=5),
        event("ncclDevKernel_AllReduce", 5, 9, on_device=True),
        event("elementwise", 9, 10, on_device=True, id=6),
        step_mark(10),
    ]
    assert by_module(trace) == {"a": 4, COMMUNICATION: 3, "(forward)": 1}


def test_parts_of_a_model_are_its_blocks_and_what_lies_beside_them() -> None:
    names = [*units_of(first_model(cell("model=vit_nano")))]
    assert [name for name in names if name.startswith("blocks.")] == [
        f"blocks.{i}" for i in range(sum(name.startswith("blocks.") for name in names))
    ]
    assert {"embedding", "norm", "head"} <= {*names}
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [*units_of(plain)] == ["0", "1"]


class Sleepy(nn.Module):
    """A layer whose forward pass takes long; computed again in the backward pass where asked."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(8, 8), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return checkpoint(self._nap, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._nap(x)

    def _nap(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_MS / 1e3)
        found: torch.Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("again", [False, True])
def test_rows_of_real_steps_add_up_and_a_slow_module_has_its_time(again: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Sleepy(again), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks, taken = TraceMarks(), count()

    def step() -> None:
        loss = model(torch.ones(4, 8)).mean()
        marks.end("forward")
        loss.backward()
        marks.end("backward")
        optimizer.step()
        optimizer.zero_grad()
        marks.end("optimizer")
        next(taken)

    with naming_modules(model):
        events = record_steps(step, 3, torch.device("cpu"))
    marks_at = sorted(e.start for e in events if e.name == "vitsweep.step")
    rows = module_rows(events, 2)
    for place in (0, 1):
        whole = (marks_at[place + 2] - marks_at[place + 1]) / 1e6
        assert sum(ms for at, _, ms in rows if at == place) == pytest.approx(whole)
    found = by_module(events, 2)
    assert found["1"] >= 2 * NAP_MS * (2 if again else 1)
    assert {"0", "1", "2", "(optimizer)"} <= found.keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
