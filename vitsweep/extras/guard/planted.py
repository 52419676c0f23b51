"""Faults to plant into a training, to test a guard: each lasts as long as its context.

Each takes effect after `from_step` optimizer steps. What is planted is seen by the training alone, and not by
the plain model; a slow rank is slow in both.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vitsweep.errors import VitsweepError
from vitsweep.extras.take_home.apply import Applied
from vitsweep.model.attention import attention_modules


@contextmanager
def lost_keys(training: Applied, keys: int = 16, from_step: int = 0) -> Iterator[None]:
    """Let the last keys vanish from attention, as in a kernel whose last tile is wrong.

    Args:
        training: whose attention modules call `self.attend(q, k, v)`, as those of vitsweep's ViTs.
        keys: so many.
        from_step: optimizer steps before the fault.

    Raises:
        VitsweepError: there are no such modules.
    """
    trainer, modules = training.trainer, attention_modules(training.model)
    if not modules:
        raise VitsweepError(
            "`lost_keys` replaces `self.attend(q, k, v)` of attention modules, and this model has none: let "
            "yours call it, or plant another fault."
        )

    def without(attend: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def attend_to_some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lost = keys if trainer.steps_taken >= from_step else 0
            found: Tensor = attend(q, *(t[..., : t.shape[-2] - lost, :] for t in (k, v)))
            return found

        return attend_to_some

    before = [(module, module.attend) for module in modules]
    for module, attend in before:
        vars(module)["attend"] = without(attend)
    try:
        yield
    finally:
        for module, attend in before:
            vars(module)["attend"] = attend


@contextmanager
def frozen_weights(training: Applied, from_step: int = 0) -> Iterator[None]:
    """Lose each update that does not move a weight to another number of bfloat16."""
    trainer, before = training.trainer, dict[Tensor, Tensor]()

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if trainer.steps_taken >= from_step else ():
            before.update({weight: weight.detach().clone() for weight in group["params"]})

    @torch.no_grad()
    def lose(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for weight, old in before.items():
            is_lost = weight.bfloat16() == old.bfloat16()
            weight.copy_(torch.where(is_lost, old, weight))
        before.clear()

    optimizer = training.optimizer
    with optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(lose):
        yield


@contextmanager
def scaled_gradients(
    training: Applied, rank: int = 0, times: float = 2.0, from_step: int = 0
) -> Iterator[None]:
    """Multiply the gradients of one rank before they are exchanged; its loss stays as it is."""
    trainer = training.trainer
    loss_of = trainer.loss

    def loss(*given: Any) -> Tensor:
        found = loss_of(*given)
        if training.world.rank != rank or trainer.steps_taken < from_step:
            return found
        return found.detach() + times * (found - found.detach())

    vars(trainer)["loss"] = loss
    try:
        yield
    finally:
        del vars(trainer)["loss"]


@contextmanager
def slow_rank(
    training: Applied, rank: int = 0, times: float = 2.0, from_step: int = 0
) -> Iterator[None]:
    """Let the forward passes of one rank last longer: each module without children waits after its own.

    It waits `times - 1` times as long as forward and backward pass together, for which three times the
    forward pass is taken.
    """
    begun: list[float] = []

    def begin(module: nn.Module, given: Any) -> None:
        begun.append(time.monotonic())

    def wait(module: nn.Module, given: Any, found: Any) -> None:
        took, is_leaf = time.monotonic() - begun.pop(), not any(module.children())
        if is_leaf and training.world.rank == rank and training.trainer.steps_taken >= from_step:
            time.sleep(3 * (times - 1) * took)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(wait):
        yield
