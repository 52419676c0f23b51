"""Cutting a finished model into stages (needs torch)."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn


def cut(
    model: nn.Module,
    rank: int,
    ranks: int,
    per_rank: int,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> list[nn.Module]:
    """Return this rank's stages; stage s lies on rank s mod `ranks`.

    Blocks are dealt out contiguously and evenly, the first stages having one more where they do not
    divide. Parameters keep their names: block 3 is `blocks.3` in whichever stage it is.
    """
    num_stages, blocks = ranks * per_rank, list(model.blocks)  # type: ignore[arg-type]
    starts = [stage * len(blocks) // num_stages for stage in range(num_stages + 1)]
    return [
        _stage(
            model,
            {str(i): blocks[i] for i in range(starts[stage], starts[stage + 1])},
            first=stage == 0,
            last=stage == num_stages - 1,
            forward_context=forward_context,
        )
        for stage in range(rank, num_stages, ranks)
    ]


class StagePart:
    """What a stage does instead of the whole model's forward; mixed into the model's class."""

    blocks: Any
    embedding: nn.Module | None
    head: nn.Module | None

    forward_context: Callable[[], AbstractContextManager[Any]]

    def forward(self, x: Tensor) -> Tensor:
        """Map images, or the tokens of the previous stage, to tokens, or in the last stage to outputs."""
        # Inside the stage: the schedule runs forward and backward, and the latter has no autocast.
        with self.forward_context():
            return self._part(x)

    def _part(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.transform(x, self.blocks.values())  # type: ignore[attr-defined]
        if self.head is not None:
            return self.read_out(x)  # type: ignore[attr-defined]
        return x.contiguous()  # what is sent must be


def _stage(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    *,
    first: bool,
    last: bool,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> nn.Module:
    stage = copy.copy(model)
    stage._modules = dict(model._modules)
    stage.blocks = nn.ModuleDict(blocks)
    if not first:
        stage.embedding = None  # type: ignore[assignment]
    if not last:
        stage.norm = stage.head = None  # type: ignore[assignment]
    stage.forward_context = forward_context  # type: ignore[assignment]
    stage.__class__ = type("Stage", (StagePart, type(model)), {})
    return stage
