"""Optimizers by their equations: what torch computes, and what they do not."""

from dataclasses import replace

import pytest
import torch

from tests.training.alone import alone
from vitsweep.spec.technique import OptimizerChoice
from vitsweep.training.optimizer_definitions import series_apart
from vitsweep.training.reference import plain_model
from vitsweep.training.twin import twin_of

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
