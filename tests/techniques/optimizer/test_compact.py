"""AdamW with a compact state: the update of torchao, memory as the formats say, refusals."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import cell, entry
from tests.choices import choice
from tests.ranks import on_ranks, placed
from vitsweep.console import TORCHAO_IMPORT, quiet_loggers
from vitsweep.equivalence import prove
from vitsweep.measure.memory import optimizer_tensors
from vitsweep.training.update import parameter_groups
from vitsweep.world import World

with quiet_loggers(*TORCHAO_IMPORT):
    torchao = pytest.importorskip("torchao.optim", reason="pip install 'vitsweep[torchao]'")

COMPACT = ["adamw_8bit", "adamw_4bit", "adamw_bf16_state"]
THEIRS = {"adamw_8bit": torchao.AdamW8bit, "adamw_4bit": torchao.AdamW4bit}
BITS = {"adamw_8bit": 8 + 32 / 256, "adamw_4bit": 4 + 32 / 128, "adamw_bf16_state": 16}
RATE = 0.01


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> nn.Module:
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def built(name: str, model: nn.Module) -> Any:
    return choice("optimizer", name, eps=1e-8, compiled=False, learning_rate=RATE).build(
        parameter_groups(model, 0.1)
    )


@pytest.mark.parametrize("name", THEIRS)
def test_the_steps_are_those_of_torchaos_optimizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, peer = net(), net()
    train(mine, built(name, mine))
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # the same, without minutes
    groups = [{k: g[k] for k in ("params", "weight_decay")} for g in parameter_groups(peer, 0.1)]
    train(peer, THEIRS[name](groups, lr=RATE))
    for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.equal(mine[0].weight, train(net(), built("adamw_bf16_state", net()))[0].weight)


@pytest.mark.parametrize("name", COMPACT)
def test_the_state_has_the_size_of_its_format(name: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 64))
    optimizer = built(name, model)
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    held = SimpleNamespace(optimizer=optimizer, masters=None, average=None)
    stored = sum(t.nbytes for t in optimizer_tensors(held))
    large, small = 512 * 512 + 512 * 64, 64
    tables = 0 if name == "adamw_bf16_state" else 2 * 2 * 4 * (256 if name == "adamw_8bit" else 16)
    of_small = 2 * small * (2 if name == "adamw_bf16_state" else 4)
    counts = 3 * 4  # one step count per tensor
    assert stored == 2 * large * BITS[name] / 8 + of_small + tables + counts
    if name == "adamw_8bit":
        assert stored < 0.3 * 8 * (large + small)


def test_stochastic_rounding_keeps_updates_that_rounding_loses() -> None:
    def drift(name: str) -> float:
        weight = nn.Parameter(torch.full((4096,), 1.0, dtype=torch.bfloat16))
        groups = [{"params": [weight], "names": ["w"], "weight_decay": 0.0}]
        chosen = choice("optimizer", name, eps=1e-8, compiled=False, learning_rate=1e-4)
        optimizer = chosen.build(groups)
        for _ in range(20):  # 2e-3 together; the last digit of 1 in bfloat16 is 4e-3 or 8e-3
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return float(1 - weight.detach().float().mean())

    torch.manual_seed(0)
    assert drift("adamw_bf16_state") == 0
    assert drift("adamw_stochastic") == pytest.approx(2e-3, rel=0.2)


def proofs(world: World, cells: list[Any]) -> list[float]:
    return [prove(each, placed(world, each)) for each in cells]


EACH_ONCE = [("adamw_8bit", "ddp"), ("adamw_4bit", "fsdp"), ("adamw_bf16_state", "fsdp")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs", [EACH_ONCE, pytest.param(product(COMPACT, ("ddp", "fsdp")), marks=pytest.mark.full)]
)
def test_compact_states_train_like_adamw_under_ddp_and_fsdp(
    tmp_path: Path, pairs: Iterable[tuple[str, str]]
) -> None:
    cells = [cell(f"optimizer={name}", f"sharding={sharding}") for name, sharding in pairs]
    differences: list[float] = on_ranks(2, proofs, cells[0], cells, folder=tmp_path)[0]
    for each, found in zip(cells, differences, strict=True):
        assert 0 < found <= each.optimizer.relative_tolerance(), each.optimizer.name


def test_the_prediction_counts_the_compact_state() -> None:
    trace_cell = pytest.importorskip("vitsweep.extras.predict.trace").trace_cell
    large = ("model=vit_tiny", "model.depth=2", "data=synthetic", "batch.images_per_step=2")
    state = {
        name: trace_cell(
            entry(*large, "resources.ranks_per_node=1", f"optimizer={name}").spec
        ).memory.optimizer
        for name in ("adamw_loop", "adamw_8bit")
    }
    assert 0.25 < state["adamw_8bit"] / state["adamw_loop"] < 0.3


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["optimizer=adamw_8bit", "sharding=zero1"],
            "gives blocks of 256 numbers of a tensor one scale",
        ),
        (
            ["optimizer=adamw_4bit", "sharding=zero1"],
            "gives blocks of 128 numbers of a tensor one scale",
        ),
        (
            ["optimizer=adamw_stochastic"],
            "rounds bfloat16 weights, and `precision=fp32` updates float32",
        ),
        (["optimizer=adamw_stochastic", "precision=O2"], "`precision=O2` updates float32 ones"),
    ],
)
def test_what_has_no_blocks_or_no_bfloat16_weights_is_refused(
    overrides: list[str], reason: str
) -> None:
    reasons = entry(*overrides).reasons
    assert any(reason in r for r in reasons), reasons


def test_a_missing_torchao_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("vitsweep.torch_compat.version", missing)
    assert "`pip install 'vitsweep[torchao]'`" in " ".join(entry("optimizer=adamw_8bit").reasons)
