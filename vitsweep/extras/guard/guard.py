"""`vitsweep.Guard`: checks of a training while it runs, of its weights and of its ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitsweep.collectives.primitives import gathered, local
from vitsweep.extras.guard.arguments import open_record, require
from vitsweep.extras.guard.check import CheckResult, check, raise_fault, slowness
from vitsweep.extras.take_home.apply import Applied
from vitsweep.training.shards import updated

SLOW_TIMES = 1.5
"""A rank is slow whose passes of the plain model take so many times as long as those of others."""


class Guard:
    """Checks a training every so many steps; every rank has one.

    Beside what `vitsweep.check` compares it reports weights that have not moved since its last check, though
    they have gradients, and ranks that are slow where they wait for no other.

    Args:
        training: what `vitsweep.apply` returned.
        every_steps: optimizer steps between checks.
        on_check: called on rank 0 with each result, whose text is a sentence or two.
        record: file of JSON lines to which rank 0 adds each result; None for none.
        raise_on_fault: as of `vitsweep.check`.

    Raises:
        BadValueError: an argument is of another kind, or `record` cannot be written.
    """

    def __init__(
        self,
        training: Applied,
        every_steps: int = 2000,
        on_check: Callable[[CheckResult], object] = print,
        *,
        record: str | Path | None = "checks.jsonl",
        raise_on_fault: bool = False,
    ) -> None:
        require(training=training, every_steps=every_steps, on_check=on_check)
        require(record=record, raise_on_fault=raise_on_fault)
        open_record(record, training.world.rank)  # fails now, and not hours later
        self._training, self._every, self._on_check = training, every_steps, on_check
        self._record, self._raises = record, raise_on_fault
        self._marks: dict[str, int] = {}

    def step(self, batch: Any) -> Tensor:
        """Train on a batch as the step of `apply` does, after a check where one is due.

        Raises:
            FaultFoundError: see `raise_on_fault`; this step was not taken.
            VitsweepError: as of `vitsweep.check` and of the step of `apply`.
        """
        training = self._training
        taken = training.trainer.steps_taken
        if taken and taken % self._every == 0 and training.has_begun:
            result = check(training, batch)
            times = enumerate(slowness(result.plain_s))
            slow = tuple(rank for rank, each in times if each > SLOW_TIMES)
            result = replace(result, unmoved=self._unmoved(result), slow_ranks=slow)
            if training.world.rank == 0:
                if self._record is not None:
                    with Path(self._record).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result.as_line()) + "\n")
                self._on_check(result)
            if self._raises:
                raise_fault(result)
        return training.step(batch)

    @torch.no_grad()
    def _unmoved(self, result: CheckResult) -> tuple[str, ...]:
        """Return weights of which no rank's part has moved; remember them all for the next check."""
        trainer, before = self._training.trainer, self._marks
        rates = {id(t): g["lr"] for g in trainer.optimizer.param_groups for t in g["params"]}
        self._marks, moved = {}, dict[str, bool]()
        for each in updated(trainer):
            for shard in each.views(local(each.tensor).detach()):
                key, mark = f"{shard.name} {shard.offsets}", _mark(shard.values)
                self._marks[key] = mark
                if key in before and rates[id(each.tensor)] and shard.values.numel():
                    moved[shard.name] = moved.get(shard.name, False) or mark != before[key]
        ranks = gathered(moved)
        still = {name for rank in ranks for name, has_moved in rank.items() if not has_moved}
        still -= {name for rank in ranks for name, has_moved in rank.items() if has_moved}
        return tuple(sorted(still - {*result.without_gradient}))


def _mark(values: Tensor) -> int:
    """Return a number that differs where any of the numbers does."""
    real = torch.view_as_real(values) if values.is_complex() else values
    bits = real.reshape(-1).view(getattr(torch, f"int{8 * real.element_size()}")).to(torch.int64)
    return int((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum())
