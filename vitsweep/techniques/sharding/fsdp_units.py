"""What FSDP2 asks of a user's module: each rank reaches the same units in one order (needs torch)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vitsweep.collectives.primitives import lacking_everywhere
from vitsweep.errors import RanksApartError
from vitsweep.model.initialize import plain_name
from vitsweep.model.module_look import differentiable
from vitsweep.world import World

REACHED = ("pre_forward", "pre_backward", "post_backward")
"""Methods of a unit that gather it in either pass, and exchange its gradients (torch 2.9 to 2.15)."""
PRE_FORWARD, PRE_BACKWARD, POST_BACKWARD = range(len(REACHED))
PASSES = ("the forward pass", "the backward pass", "the exchange of its gradients")
END = (-1, 0)
"""Reached after all units."""


class Units:
    """Watches the units of a module while it is trained.

    FSDP2 exchanges the parameters or gradients of a unit when the module reaches it, on each rank by
    itself: where two ranks reach different units it mixes them, or waits for ever. In the first
    micro-batch the ranks therefore agree on each unit before they exchange anything of it, and refuse
    together. From then on each compares itself with that order, and refuses before its next exchange.

    Within a unit ranks may use different parameters: one without a gradient counts as zero in the sum,
    and has none where no rank had one.

    Args:
        model: with units of FSDP2.
        sharding: as typed, for messages.
        world: ranks that average gradients.
    """

    def __init__(self, model: nn.Module, sharding: str, world: World) -> None:
        self._sharding, self._rank, self._device = sharding, world.rank, world.device
        self._group = world.gradient_group()
        self._units: list[Any] = []  # FSDPParamGroup
        self._names: list[str] = []
        for path, module in model.named_modules():
            is_unit = isinstance(module, FSDPModule)
            unit: Any = module._get_fsdp_state()._fsdp_param_group if is_unit else None
            name = f"`{plain_name(path)}`" if path else "the parameters outside of blocks"
            if unit in self._units:
                self._names[self._units.index(unit)] += f", {name}"
            elif unit is not None:
                self._units.append(unit)
                self._names.append(name)
        self._trained = [  # FSDPParam, by unit
            [p for p in unit.fsdp_params if p.sharded_param.requires_grad] for unit in self._units
        ]
        self._has_gradient: set[Any] = set()
        # of the first micro-batch: unit, place in `REACHED`
        self._order: list[tuple[int, int]] = []
        self._next, self._order_is_known, self._is_training = 0, False, False
        watch = torch.compiler.disable(self._watch_outputs)
        for number, unit in enumerate(self._units):
            for module in unit.modules if len(unit.modules) > 1 else ():
                module.register_forward_hook(partial(watch, number))
            for which, name in enumerate(REACHED):
                setattr(unit, name, self._watched(number, which, getattr(unit, name)))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Compare the units that are reached inside with those of the first micro-batch."""
        self._next, self._is_training = 0, True
        if not self._order_is_known:
            self._order.clear()
        try:
            yield
            self._reach(END)
            self._order_is_known = True
        except BaseException:
            self._has_gradient.clear()
            raise
        finally:
            self._is_training = False

    def drop_zeros(self) -> None:
        """Let parameters that had a gradient on no rank have none; every rank calls it."""
        trained = [parameter for unit in self._trained for parameter in unit]
        lacks = [parameter not in self._has_gradient for parameter in trained]
        self._has_gradient.clear()
        for index in lacking_everywhere(lacks, self._device, self._group):
            trained[index].sharded_param.grad = None

    def _watched(self, number: int, which: int, method: Callable[..., Any]) -> Callable[..., Any]:
        unit = self._units[number]

        @wraps(method)
        def watched(*arguments: Any) -> Any:
            is_begun = which == PRE_BACKWARD and unit._training_state.name == "PRE_BACKWARD"
            if self._is_training and not is_begun:
                self._reach((number, which))
                if which == POST_BACKWARD and unit.reduce_grads:
                    self._fill(self._trained[number])
            return method(*arguments)

        return watched

    def _watch_outputs(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """FSDP2 gathers several modules for the backward pass where it reaches the last of them alone."""
        unit = self._units[number]

        def require_gathered(gradient: Tensor) -> None:
            if self._is_training and unit._training_state.name != "PRE_BACKWARD":
                raise self._refusal(
                    f"the loss of this rank ({self._rank}) depends on some of {self._names[number]}, which "
                    "are gathered together, and not on the last"
                )

        for output in differentiable(outputs):
            output.register_hook(require_gathered)

    def _fill(self, parameters: list[Any]) -> None:
        """Note which parameters of a unit have a gradient; let zeros stand for those of the others."""
        of_earlier = any(p.unsharded_accumulated_grad is not None for p in parameters)
        for parameter in parameters:
            if parameter.unsharded_accumulated_grad is not None:
                self._has_gradient.add(parameter)
                continue
            whole = parameter.unsharded_param
            if whole.grad is not None:
                self._has_gradient.add(parameter)
            else:
                whole.grad = torch.zeros_like(whole)
            if of_earlier:  # all in the dtype in which earlier micro-batches are summed
                parameter.to_accumulated_grad_if_needed()

    def _reach(self, reached: tuple[int, int]) -> None:
        """Check that all ranks reach this now: by what they did at first, and at first by asking."""
        if not self._order_is_known:
            self._agree(reached)
            self._order.append(reached)
            return
        wanted = self._order[self._next] if self._next < len(self._order) else END
        self._next += 1
        if reached != wanted:
            raise self._refusal(
                f"this rank ({self._rank}) reaches {self._place(reached)} where {self._place(wanted)} came "
                "in the first step"
            )

    def _agree(self, reached: tuple[int, int]) -> None:
        number, which = reached
        code = number * len(REACHED) + which
        codes = torch.tensor([code, -code], device=self._device)
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            dist.all_reduce(codes, dist.ReduceOp.MAX, group=self._group)
        last, first = codes.tolist()
        if last != -first:
            both = (self._place(divmod(each, len(REACHED))) for each in (-first, last))
            raise self._refusal(f"one rank reaches {' where another reaches '.join(both)}")
        if which != PRE_FORWARD or reached == END:  # the forward pass is over
            called = {unit for unit, method in self._order if method == PRE_FORWARD}
            if missing := [n for unit, n in enumerate(self._names) if unit not in called]:
                raise self._refusal(f"the forward pass does not call {', '.join(missing)}")
        is_unreached = which == POST_BACKWARD and (number, PRE_BACKWARD) not in self._order
        if is_unreached and self._trained[number]:
            raise self._refusal(f"the loss does not depend on {self._names[number]}")

    def _place(self, reached: tuple[int, int]) -> str:
        number, which = reached
        return (
            "the end of the step" if reached == END else f"{self._names[number]} in {PASSES[which]}"
        )

    def _refusal(self, fault: str) -> RanksApartError:
        return RanksApartError(
            f"`sharding={self._sharding}` gathers the blocks of a model one by one, on all ranks and in each "
            f"micro-batch in the same order, and {fault}: use `sharding=ddp` or `sharding=zero1`, under "
            "which a step may leave out blocks, and parameters may be frozen between steps."
        )
