"""Names of modules in a trace."""

import torch
from torch import nn

from tests.cells import cell
from vitsweep.measure.communication import MODULE, naming_modules, units_of
from vitsweep.model.build import first_model


def test_parts_of_a_model_are_its_blocks_and_what_lies_outside_of_them() -> None:
    names = [*units_of(first_model(cell("model=vit_nano")))]
    assert [name for name in names if name.startswith("blocks.")] == [
        f"blocks.{i}" for i in range(sum(name.startswith("blocks.") for name in names))
    ]
    assert {"embedding", "norm", "head"} <= {*names}
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [*units_of(plain)] == ["0", "1"]


def test_a_trace_names_the_forward_passes_of_the_parts_and_the_model_keeps_no_hook() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with naming_modules(model), torch.profiler.profile() as profiled:
        for _ in range(2):
            model(torch.ones(4, 8)).mean().backward()
    names = [str(event.name) for event in profiled.events() or ()]
    named = [name.removeprefix(MODULE) for name in names if name.startswith(MODULE)]
    assert sorted(named) == ["0", "0", "1", "1", "2", "2"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
