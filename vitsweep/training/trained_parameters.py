"""Which parameters a step trains, where the model is the user's and steps may differ (needs torch)."""

from functools import partial

from torch import Tensor, nn

from vitsweep.collectives.primitives import lacking_everywhere
from vitsweep.errors import VitsweepError
from vitsweep.model.initialize import plain_name
from vitsweep.model.module_look import listed
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


class TrainedParameters:
    """The parameters that an optimizer was given, and what may change about them afterwards.

    A user's module may freeze them, and leave some without a gradient in a step. One that lies in the
    buffer of a contiguous optimizer cannot be left out of an update: all have one step count.

    Args:
        model: as the techniques wrap it.
        cell: its techniques.
        world: ranks that average gradients.

    Attributes:
        names: of the parameters, in the reference model.
    """

    def __init__(self, model: nn.Module, cell: CellSpec, world: World) -> None:
        self._model, self._cell = model, cell
        self._device, self._group = world.device, world.gradient_group()
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.names = frozenset(map(plain_name, self._trained))
        self._may_lack_gradients = cell.model.may_lack_gradients
        self._arrived: set[nn.Parameter] = set()
        if self._may_lack_gradients and cell.optimizer.keeps_gradient_views:
            for parameter in self._trained.values():
                parameter.register_hook(partial(self._note, parameter))

    def begin_step(self) -> None:
        """Make sure that the optimizer has all parameters that need gradients now.

        Raises:
            VitsweepError: it lacks one, such as one that was frozen when techniques were applied; or one
                of a model of vitsweep's was frozen since.
        """
        self._arrived.clear()
        now = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if self._cell.sharding.shards_parameters:  # whose tensors FSDP exchanges
            others = [name for name in now if name not in self._trained]
        else:
            others = [name for name, p in now.items() if self._trained.get(name) is not p]
        changed = "need gradients now, and were frozen or others when the optimizer was built"
        if not others and not self._may_lack_gradients:
            others = [name for name in self._trained if name not in now]
            changed = "were frozen since, which is possible in models of your own alone"
        if others:
            raise VitsweepError(
                f"Parameters {changed}: {listed([*map(plain_name, others)])}. Set `requires_grad` before "
                "`vitsweep.apply`: call `apply` again, with a new model that loads `weights()`."
            )

    def _note(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:  # as of an output that the loss does not read, under DDP
            self._arrived.add(parameter)

    def require_gradients(self) -> None:
        """Make sure that each parameter in a contiguous optimizer's buffer has a gradient on some rank.

        Every rank calls it, before the update.

        Raises:
            VitsweepError: one has none; on all ranks alike.
        """
        optimizer = self._cell.optimizer
        if not self._may_lack_gradients or not optimizer.keeps_gradient_views:
            return
        lacks = [parameter not in self._arrived for parameter in self._trained.values()]
        found = lacking_everywhere(lacks, self._device, self._group)
        if found:
            names = [plain_name(name) for name in self._trained]
            raise VitsweepError(
                f"`optimizer={optimizer.name}` updates all parameters of a buffer alike, and in this step "
                f"{listed([names[index] for index in found])} had a gradient on no rank (left out of the "
                f"forward pass or of the loss, or frozen): use `optimizer={optimizer.instead}`."
            )
