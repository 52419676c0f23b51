"""Optimizers by their equations: what torch computes, and what they do not."""

from dataclasses import replace

import pytest
import torch

from tests.training.alone import alone
from vitsweep.proof.optimizer_definitions import (
    ByEquations,
    _few,
    _orthogonal,
    _size,
    _told,
    decays,
    is_elementwise,
    series_apart,
)
from vitsweep.proof.reference import plain_model
from vitsweep.proof.twin import twin_of
from vitsweep.spec.technique import OptimizerChoice

ADAMW, SGD, MUON = "adamw_foreach", "sgd_loop", "muon"


def apart(choice: OptimizerChoice | None = None, *overrides: str) -> str:
    spec = alone(*overrides)
    return series_apart(plain_model(twin_of(spec), torch.device("cpu")), choice or spec.optimizer)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer=adamw_contiguous"],
        ["optimizer=sgd_foreach", "optimizer.nesterov=true", "optimizer.weight_decay=0.1"],
        ["optimizer=muon"],
        pytest.param(["optimizer=adamw_fused"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_an_optimizer_is_its_equations_on_a_long_series(overrides: list[str]) -> None:
    assert apart(None, *overrides) == ""


@pytest.mark.parametrize(
    ("optimizer", "changes", "what"),
    [
        ("adamw_fused", {"beta2": 0.998}, "weight"),
        ("adamw_fused", {"learning_rate": 1.01e-3}, "weight"),
        ("adamw_fused", {"eps": 1e-4}, "weight"),
        ("adamw_fused", {"weight_decay": 0.0}, "weight"),
        ("sgd_fused", {"momentum": 0.89}, "weight"),
        ("muon", {"momentum": 0.9}, "weight"),
    ],
)
def test_another_setting_than_the_one_asked_for_shows(
    optimizer: str, changes: dict[str, float], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = alone(f"optimizer={optimizer}", "optimizer.learning_rate=0.001").optimizer
    asked = replace(asked, weight_decay=0.05)
    given = replace(asked, **changes)
    monkeypatch.setattr(type(given), "plain", lambda choice: _plain_of(asked))
    told = apart(given)
    assert told.startswith(f"{what} `")
    assert "after 200 updates" in told


def _plain_of(choice: OptimizerChoice) -> OptimizerChoice:
    if hasattr(choice, "implementation"):
        return replace(choice, implementation="loop")  # type: ignore[call-arg]
    return choice


def named(**numbers: object) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def test_equations_of_two_updates_by_hand() -> None:
    sgd = replace(
        alone(f"optimizer={SGD}").optimizer, learning_rate=0.5, momentum=0.5, weight_decay=0.1
    )
    for nesterov, first, second in (
        (False, 4 - 1.2, 2.8 - 0.5 * 3.48),
        (True, 4 - 1.8, 2.2 - 0.5 * 3.93),
    ):
        update = ByEquations(replace(sgd, nesterov=nesterov), torch.float64)
        weights = named(weight=[[4.0]])
        found = []
        for _ in range(2):
            weights = update(weights, named(weight=[[2.0]]))
            found.append(float(weights["weight"]))
        assert found == pytest.approx([first, second])
    settings = {"learning_rate": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.5, "weight_decay": 0.1}
    adamw = replace(alone(f"optimizer={ADAMW}").optimizer, **settings)
    update = ByEquations(adamw, torch.float64)
    first = update(named(weight=[[4.0]], bias=[4.0]), named(weight=[[2.0]], bias=[2.0]))
    step = 0.5 * 2 / (2 + 0.5)
    assert float(first["weight"]) == pytest.approx(0.95 * 4 - step)
    assert float(first["bias"]) == pytest.approx(4 - step), "a vector does not decay"
    second = update(first, named(bias=[4.0]))
    m, v = (0.5 * 1 + 0.5 * 4) / 0.75, (0.75 * 1 + 0.25 * 16) / (1 - 0.75**2)
    assert second.keys() == {"bias"}
    assert float(second["bias"]) == pytest.approx(4 - step - 0.5 * m / (v**0.5 + 0.5))
    assert (update.state["bias"]["step"], update.state["weight"]["step"]) == (2, 1)


def test_weights_and_state_are_rounded_as_they_are_stored() -> None:
    sgd = replace(
        alone(f"optimizer={SGD}").optimizer, learning_rate=2.0**-8, momentum=0.5, weight_decay=0.0
    )
    stored = ByEquations(sgd, torch.float32, torch.bfloat16)
    found = stored({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0 + 2.0**-9])})["w"]
    assert (found.dtype, float(found)) == (torch.bfloat16, 1.0 - 2.0**-8)
    assert float(stored.state["w"]["momentum_buffer"]) == 1.0
    assert ByEquations(sgd, torch.float32)({"w": torch.tensor([1.0])}, {}) == {}


def test_muon_turns_a_gradient_into_an_orthogonal_step_of_its_size() -> None:
    assert [_size(torch.zeros(shape)) for shape in ((4, 4), (16, 4), (4, 100))] == pytest.approx(
        [0.4, 0.8, 2.0]
    )
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 3), (3, 6)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = _orthogonal(matrix, 5)
        assert found.shape == shape
        assert all(0.6 < float(value) < 1.3 for value in torch.linalg.svdvals(found))
        for factor in (7, 1e-3):
            torch.testing.assert_close(_orthogonal(factor * matrix, 5), found)
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        assert float((found * (u @ vh)).sum()) > 2.4
    muon = alone(f"optimizer={MUON}").optimizer
    assert not is_elementwise(muon)
    assert is_elementwise(alone(f"optimizer={ADAMW}").optimizer)
    fused = ByEquations(
        replace(muon, weight_decay=0.0), torch.float64, in_blocks={"a.qkv.weight", "b.weight"}
    )
    weights = {
        name: torch.zeros(6, 2, dtype=torch.float64)
        for name in ("a.qkv.weight", "b.weight", "c.weight")
    }
    gradient = torch.randn((6, 2), generator=generator, dtype=torch.float64)
    moved = fused(weights, dict.fromkeys(weights, gradient))
    for part, own in zip(moved["a.qkv.weight"].chunk(3), gradient.chunk(3), strict=True):
        whole = -muon.learning_rate * _orthogonal(own, muon.iterations) * _size(own)
        torch.testing.assert_close(part, whole)
    whole = -muon.learning_rate * _orthogonal(gradient, muon.iterations) * _size(gradient)
    torch.testing.assert_close(moved["b.weight"], whole)
    assert set(fused.state["c.weight"]) == {"step", "exp_avg", "exp_avg_sq"}, (
        "AdamW outside of blocks"
    )


def test_few_tensors_of_a_model_stand_for_all() -> None:
    blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(9, 9), "blocks": blocks, "head": torch.nn.Linear(4, 2)}
    )
    chosen = _few(model)
    assert chosen.keys() == {"first.weight", "blocks.1.weight", "head.weight", "head.bias"}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == chosen.keys()
    numbers = torch.nn.Module()
    numbers.one = torch.nn.Parameter(torch.zeros(2, 2, 2))
    assert _few(numbers).keys() == {"one"}
    assert decays("a.weight", torch.zeros(2, 2))
    assert not decays("a.weight", torch.zeros(2))
    assert not decays("a.bias", torch.zeros(2, 2))


def test_a_difference_counts_beyond_its_share_and_its_rounding() -> None:
    wanted = torch.tensor([3.0, 4.0])
    for apart, is_told in ((0.52, False), (0.54, True), (float("nan"), True)):
        found = wanted + torch.tensor([0.0, apart])
        assert bool(_told("x", found, wanted, 4, 0.1, 0.03)) is is_told
    assert _told("x", torch.tensor([1.0]), 0.0, 4, 0.1)
