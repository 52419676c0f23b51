"""What `vitsweep.apply` sees of a model of the user's, and refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitsweep
from tests.user_modules import (
    Blocks,
    KeepsResults,
    OfWords,
    Residual,
    with_batch_norm,
    with_lazy_linear,
    with_ties,
    with_unused_parameters,
    with_written_buffer,
    with_written_weights,
)
from vitsweep.errors import ImpossibleCellError


@pytest.mark.parametrize(
    ("build", "technique", "words"),
    [
        (with_written_buffer, "memory=recompute_blocks", "`layers.0.calls`, `layers.1.calls`"),
        (
            with_written_weights,
            "sharding=fsdp",
            "`layers.0.module.weight`, `layers.1.module.weight`",
        ),
        (with_ties, "sharding=fsdp", "`layers.0.module.weight`, `layers.1.module.weight`"),
        (
            with_lazy_linear,
            "sharding=ddp",
            "in `LazyLinear`",
        ),
    ],
)
def test_apply_refuses_what_plan_refuses(
    build: Callable[[], nn.Module], technique: str, words: str
) -> None:
    with (
        pytest.raises(ImpossibleCellError, match=re.escape(words)),
        vitsweep.apply(f"{technique} resources.threads_per_rank=1", build()) as applied,
    ):
        applied.step(BATCH)
    assert not torch.distributed.is_initialized(), "an error in one process leaves nothing behind"


BATCH = torch.rand(8, 1, 8, 8), torch.arange(8)


def stepped(model: nn.Module, technique: str, batch: Any = BATCH, loss: Any = None) -> float:
    with vitsweep.apply(f"{technique} resources.threads_per_rank=1", model, loss) as applied:
        first, _ = (applied.step(batch) for _ in range(2))
    return float(first)


def test_apply_looks_at_a_model_with_the_callers_own_batch() -> None:
    words, labels = torch.arange(24).view(8, 3), torch.arange(8)
    for batch in ((words, labels), {"tokens": words, "label": labels}):
        torch.manual_seed(0)
        model = OfWords()
        wanted = nn.functional.cross_entropy(model(words), labels).item()

        def loss(outputs: Tensor, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch["label"])

        own = loss if isinstance(batch, dict) else None
        found = stepped(model, "sharding=fsdp memory=recompute_blocks", batch, own)
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_apply_lets_parameters_without_a_gradient_be(sharding: str) -> None:
    model = with_unused_parameters()
    before = model.old_head.weight.detach().clone()  # type: ignore[union-attr, operator]
    stepped(model, f"sharding={sharding}")
    assert torch.equal(model.old_head.weight, before)  # type: ignore[union-attr]


def test_a_model_that_cannot_be_copied_or_run_without_values_is_named() -> None:
    with pytest.warns(UserWarning, match=r"KeepsResults .*copied \("):
        stepped(KeepsResults(), "sharding=ddp")
    reads_values = Blocks([Residual(16), Residual(16)])
    reads_values.register_forward_hook(
        lambda module, inputs, outputs: outputs * outputs.sum().item() ** 0
    )
    with pytest.warns(UserWarning, match=r"Blocks .*without values"):
        stepped(reads_values, "sharding=ddp")


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        ((BATCH[0], BATCH[1] + 3), None, "the label 10, "),
        ({"images": BATCH[0]}, None, "give `vitsweep.apply` a `loss`"),
        (BATCH, lambda outputs, batch: outputs.sum(1), "returned a tensor (8,)"),
        (({"x": BATCH[0], "name": ["a"] * 8}, BATCH[1]), None, "a string at [0]['name'][0]"),
    ],
)  # fmt: skip
def test_a_batch_or_loss_that_cannot_be_trained_on_is_reported(
    batch: Any, loss: Any, words: str
) -> None:
    parts = "batch.accumulation_steps=2 " if "string" in words else ""
    with pytest.raises(vitsweep.VitsweepError, match=re.escape(words)):
        stepped(with_batch_norm(), f"{parts}sharding=ddp", batch, loss)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("precision", ["precision=fp32", "precision.dtype=float64"])
def test_a_float64_model_is_looked_at_as_any_other(precision: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten(), nn.Linear(4, 10)).double()
    cell = f"{precision} sharding=none optimizer=sgd_loop resources.device=cpu"
    with vitsweep.apply(cell, model) as applied:
        applied.step((torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.arange(4)))
