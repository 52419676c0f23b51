"""`vitsweep.apply`: the techniques of a cell around a model, in a training loop of one's own."""

import atexit
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map_only

from vitsweep.errors import (
    BadValueError,
    ImpossibleCellError,
    RanksApartError,
    VitsweepError,
)
from vitsweep.execution.process import joined_process_group, own_world
from vitsweep.execution.rank_processes import rendezvous
from vitsweep.extras.take_home.asked_cell import (
    Cell,
    for_model,
    place,
    spec_of,
    without_effect,
)
from vitsweep.job_environment import init_method
from vitsweep.model.block import mark_blocks
from vitsweep.model.module_look import (
    Look,
    as_it_was,
    follow,
    listed,
    logits_of,
    look_at,
    shapeless,
)
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.precision import set_process_flags
from vitsweep.model.user_module import LAZY, find_blocks, in_float32, look_problems
from vitsweep.objectives.base import Pair, as_entries, described
from vitsweep.objectives.cross_entropy import (
    IGNORED,
    CountedCrossEntropy,
    CrossEntropy,
    OwnCount,
    OwnLoss,
    number_of_images,
)
from vitsweep.parallelize import parallelize
from vitsweep.results.provenance import trusting
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.generators import named_seed, set_generators
from vitsweep.spec.model_spec import needs_equal_parts, with_equal_parts
from vitsweep.spec.rules import lacking_here, technique_conflicts
from vitsweep.training.checkpoint import (
    NON_FINITE,
    OPTIMIZER,
    allocate_state,
    complete_loading,
    give_extra_state,
    numbers,
    shards_of_training,
    state_dict_of,
)
from vitsweep.training.shards import Shard, plain_weights, whole
from vitsweep.training.trained_parameters import TrainedParameters
from vitsweep.training.trainer import Trainer, unwrapped
from vitsweep.world import World, process_flags_kept

Loss = Callable[[Any, Any], "Tensor"]


def apply(
    cell: Cell, model: "nn.Module", loss: Loss | None = None, *, loss_count: OwnCount | None = None,
    config_dir: str | Path | None = None, trust: bool = False,
) -> "Applied":  # fmt: skip
    """Put the techniques of a cell around a model of your own.

    Under torchrun or srun every rank calls it; elsewhere there is one rank. A process group that
    exists already is used.

    Args:
        cell: a row of `cells.parquet` (a mapping or Series with `sweep` and `cell_id`), the path of a
            frozen `cell.yaml`, or overrides such as `"sharding=fsdp precision=bf16"`, which may be a dict.
            A cell of `task=train` brings the optimizer's settings and label smoothing of its recipe.
        model: with its weights, the same on every rank, on the host. It is changed in place: use a new
            model for each call. `model.blocks` of the cell says what it stacks, or the largest list
            of equal modules is taken.
        loss: (outputs, batch) -> mean loss of a micro-batch; outputs are float32 or better. Without
            it the cell's: cross entropy of logits and the second entry of a batch.
        loss_count: (batch) -> over how many values of a micro-batch `loss` is a sum, where these differ, as
            pixels with a label do. The loss of a step is the sum over all micro-batches of all replicas,
            divided by their count. Without it `loss` is a mean, and weighed by the images of a micro-batch.
        config_dir: folder with more choices, for overrides.
        trust: build what a cell names that somebody else froze, such as classes of their own.

    Raises:
        BadValueError: the cell cannot be read, an argument is of another kind, or `loss_count` has no `loss`.
        ImpossibleCellError: a technique lacks something that this model, loss or world has not; all
            reasons are named. What only a pass of the model shows, its first `step` says.
        VitsweepError: the cell is for another number of ranks, the model is in use already, or its weights
            differ between ranks.
    """
    if not isinstance(model, nn.Module):
        raise BadValueError(f"`model` is {described(model)}: give a `torch.nn.Module`.")
    if "draws" in vars(model):
        raise VitsweepError(
            "This model has techniques of an earlier `vitsweep.apply` around it, which changed it in "
            "place: build a new model for each call."
        )
    if loss_count is not None and loss is None:
        raise BadValueError(
            "`loss_count` counts over what a `loss` of yours sums, and none was given: give both, or leave "
            "it out."
        )
    for name, function in (("loss", loss), ("loss_count", loss_count)):
        if function is not None and not callable(function):
            raise BadValueError(f"`{name}={function!r}` is no function: give one, or leave it out.")
    with trusting(trust):
        asked = spec_of(cell, config_dir)
        spec = for_model(asked, model)
    if (idle := without_effect(cell, asked, model)) and place()[0] == 0:
        warnings.warn(
            f"{listed(idle)} has no effect on `vitsweep.apply`: model, batches and loop are yours.",
            stacklevel=2,
        )
    if spec.task.epochs:
        spec = replace(spec, optimizer=spec.recipe.optimizer(spec))
    own = needs_equal_parts(spec, "loss") if loss is not None else ()
    recipe = [] if spec.task.epochs else spec.recipe.conflicts(spec)
    reasons = [*technique_conflicts(spec), *lacking_here(spec), *own, *recipe]
    if loss is None and not (spec.objective.is_default or spec.loss_function):
        reasons.append(
            f"`objective={spec.objective.name}` needs batches and a network of its own, and `vitsweep.apply` "
            "trains a model as it was given: give it your `loss`, or leave the objective out."
        )
    copy = None
    if isinstance(spec.model, ModuleSpec):
        try:
            copy = copied(model)
        except BadValueError as error:  # it has no shapes
            reasons.append(str(error))
        except Exception as error:  # a module that keeps results of operations
            _not_looked_at(model, "cannot be copied", error)
        else:
            reasons += look_at_given(copy, spec)[1]
    if reasons:
        raise ImpossibleCellError(reasons)
    return Applied(spec, model, loss, copy, loss_count)


def _not_looked_at(model: "nn.Module", why: str, error: Exception) -> None:
    if place()[0] == 0:
        warnings.warn(
            f"{type(model).__name__} {why} ({type(error).__name__}: {' '.join(str(error).split())}), so that "
            "vitsweep does not see weights and buffers that it writes, or parameters and modules that it "
            "leaves out, with which some techniques compute something else.",
            stacklevel=3,
        )


class Applied:
    """A model with techniques around it, and how one optimizer step of it runs.

    Attributes:
        cell: what is applied; its `model` describes the model that was given.
        world: ranks and mesh.
        model: as the techniques wrap it, for `train()`, `eval()` and hooks.
        optimizer: whose parameter groups hold `lr`, for a schedule.
        trainer: how a step is taken, for those who look into a training.
        bare: a copy of the model as it was given, on `meta`; None of ours, and of one that cannot be copied.
        has_begun: whether the model was looked at with a first batch.
    """

    def __init__(
        self,
        cell: CellSpec,
        model: "nn.Module",
        loss: Loss | None,
        copy: "nn.Module | None" = None,
        loss_count: OwnCount | None = None,
    ) -> None:
        self.cell, self.bare, self.has_begun, self._predictions = cell, copy, False, 0
        self._length: int | None = None
        objective: OwnLoss | CountedCrossEntropy
        if loss:
            objective = OwnLoss(cell, loss, loss_count, weighs=True)
        elif cell.loss_function:
            objective = OwnLoss.named_by(cell, weighs=True)
        else:
            objective = CountedCrossEntropy(cell)
        self.world = _PROCESS.enter(self)
        try:
            _refuse_other_weights(model, self.world)
            if isinstance(cell.model, ModuleSpec):
                mark_blocks(find_blocks(model, cell.model))
            lost = [n for n, v in model.state_dict().items() if not isinstance(v, torch.Tensor)]
            if lost and self.world.rank == 0:
                warnings.warn(
                    f"{type(model).__name__} keeps {listed(lost)}, which is no tensor, so that `weights` and "
                    "`state_dict` leave it out: let `get_extra_state` return a tensor.",
                    stacklevel=3,
                )
            self.trainer = parallelize(model, cell, self.world, objective=objective)
            if self.trainer.trained is None:  # ours, of which a loop may still freeze a part
                self.trainer.trained = TrainedParameters(self.model, cell, self.world)
        except BaseException:
            _PROCESS.leave(self)
            raise

    @property
    def model(self) -> "nn.Module":
        """The wrapped model."""
        return self.trainer.model

    @property
    def optimizer(self) -> "Optimizer":
        """The optimizer, over shards or master weights where the cell has them."""
        return self.trainer.optimizer

    def step(self, batch: Any) -> "Tensor":
        """Train on one optimizer step's share of this rank: accumulation, scaling and clipping inside.

        Args:
            batch: a pair of images (or other inputs) and targets, or a mapping, of which the model is
                called with the entries that its `forward` names. All tensors are on any device and have
                one length along the first axis, which is cut into `batch.accumulation_steps` parts, the
                first ones longer by one where it does not divide. Each image counts alike, whatever part
                and replica it is in.

        Returns:
            This rank's part of the loss of the step, detached, on the device: its mean over all ranks is the
            mean over the whole batch. Where all ranks count as many images or labels, it is their mean loss.

        Raises:
            VitsweepError: the batch has too few images, or a length that a pipeline or FP8
                does not take, or `close` was called.
            ImpossibleCellError: in the first step, before anything is trained: a technique cannot do what
                the model does with this batch, or a label is none of the model's.
            RanksApartError: FSDP cannot do what the model does in this step; this rank has left the others.
        """
        micro_batches = self.micro_batches(batch)
        try:
            loss = self.trainer.step(iter(micro_batches))
        except RanksApartError:
            _PROCESS.leave(self, failed=True)
            raise
        del self.trainer.skipped[:-1]  # a long training does not count its skipped steps
        return loss

    def micro_batches(self, batch: Any, name: str = "step", parts: int | None = None) -> list[Any]:
        """Return the parts of a batch on the device, ready to be trained on; torch has the cell's flags then.

        Args:
            batch: as `step` takes it; raises as `step` does, which looks at the model with the first one.
            name: of what is called with it, for messages.
            parts: so many; without it `batch.accumulation_steps`.
        """
        _PROCESS.set_flags(self)
        self._refuse_within_averaged(name)
        if not isinstance(batch, (Mapping, tuple, list)):
            raise BadValueError(
                f"The batch is {described(batch)}: give a pair of inputs and targets, or a mapping."
            )
        found = _split(batch, parts or self.cell.batch.accumulation_steps, self.world.device)
        self._refuse_other_lengths(sum(number_of_images(part) for part in found))
        if not self.has_begun:
            if reasons := self._agreed([*self._faults(found[0])]):
                raise ImpossibleCellError(reasons)
            self.has_begun = True
        return found

    def _refuse_other_lengths(self, length: int) -> None:
        """Refuse a batch that does not divide, or is unlike the first, where all parts must be equal."""
        cell, typed = self.cell, with_equal_parts(self.cell)
        parts = cell.batch.accumulation_steps * cell.pipeline_parallel.microbatches
        first = self._length or length
        if typed and (length % parts or length != first):
            before = f", after one of {first}" if length != first else ""
            raise VitsweepError(
                f"The batch has {length} images{before}, and `{typed[0]}` takes batches of one length, in "
                f"{parts} equal parts: give the loader such a batch size, and `drop_last=True`."
            )
        self._length = first

    def _agreed(self, reasons: list[str]) -> list[str]:
        """Return this rank's reasons, or one where only others have any: no rank waits for one that stops."""
        refused = _on_any_rank(bool(reasons), self.world)
        if refused and not reasons:
            return ["Another rank refuses its part of the first batch: its error says why."]
        return reasons

    def _faults(self, batch: Any) -> Iterator[str]:
        """Look at what the model does with a batch, and at its labels."""
        cell, trainer, model = self.cell, self.trainer, unwrapped(self.model)
        classes = 0 if isinstance(cell.model, ModuleSpec) else cell.model.num_classes
        batch, objective = as_entries(batch), trainer.objective
        by_name, reads_labels = not isinstance(batch, Pair), isinstance(objective, CrossEntropy)
        if reads_labels and by_name and getattr(cell.data, "label", None) not in batch:
            yield (
                "The cross entropy needs labels, and the cell says of none of the entries "
                f"{listed(list(batch))} that it holds them (`data.label`): give `vitsweep.apply` a `loss`."
            )
            return
        if reads_labels and not by_name and len(batch) != 2:
            yield (
                f"The cross entropy reads two entries of a batch, inputs and labels, and not {len(batch)}: "
                "give `vitsweep.apply` a `loss` that reads others."
            )
            return
        labels = objective.labels(batch) if isinstance(objective, CrossEntropy) else None
        if labels is not None and labels.is_floating_point() and labels.ndim < 2:
            yield (
                f"The labels are {described(labels)} of {labels.dtype}: give numbers of classes as integers, "
                "shares of all classes along a second axis, or `vitsweep.apply` a `loss`."
            )
            return
        if self.bare is not None:
            follow(self.bare, model)
            # one's own may count its calls
            loss = partial(trainer.criterion, step=trainer.at()) if reads_labels else None
            seen = batch if by_name else (trainer.cast(batch["image"]), *[*batch.values()][1:])
            look, reasons = look_at_given(self.bare, cell, seen, loss)
            yield from reasons
            if look.error:
                _not_looked_at(model, "cannot be run on this batch without values", look.error)
            shape: tuple[int, ...] = getattr(logits_of(look.outputs), "shape", ())
            classes = shape[1] if len(shape) > 1 else 0
        if labels is None or not classes or labels.is_floating_point():
            return
        outside = labels[((labels < 0) | (labels >= classes)) & (labels != IGNORED)]
        if len(outside):
            yield (
                f"The batch has the label {int(outside[0])}, and the model returns {classes} logits, for "
                f"labels from 0 to {classes - 1}: let it return more, or number the classes from 0."
            )

    def predict(self, inputs: "Tensor | Mapping[str, Any]") -> Any:
        """Return the model's outputs in evaluation mode, in the cell's precision, without gradients.

        Every rank calls it. Afterwards the model, torch's default generators and those of `random` and NumPy
        are as before. A module that draws in evaluation mode draws other numbers in each call.

        Args:
            inputs: images, or a mapping as `step` takes it.
        """
        _PROCESS.set_flags(self)
        [there] = _split(inputs, 1, self.world.device)
        self._predictions += 1
        trainer = self.trainer
        purpose = f"prediction {trainer.draws.replica} {self._predictions}"
        with as_it_was(self.model):
            set_generators(named_seed(trainer.draws.seed, purpose), self.world.device)
            self.model.eval()
            return trainer.predict(there if isinstance(there, Mapping) else (there,))

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which `predict` and `weights` have the averaged weights; every rank enters it.

        Without `averaging` in the cell it changes nothing.

        Raises:
            VitsweepError: this is inside of such a context already.
        """
        self._refuse_within_averaged("averaged")
        return self.trainer.averaged_weights()

    def _refuse_within_averaged(self, name: str) -> None:
        if self.trainer.is_averaged:
            raise VitsweepError(
                f"`{name}` was called inside of `with averaged()`, where the model has its averaged weights: "
                "leave the `with` block first."
            )

    def weights(self) -> "dict[str, Tensor]":
        """Return whole weights and buffers under the reference model's names; every rank calls it.

        `model.load_state_dict` of the reference model takes them.
        """
        return plain_weights(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all tensors and numbers that further steps depend on, but torch's generators.

        Returns:
            `tensors`: what this rank holds of model (masters where there are any), optimizer state and
            averaged weights, by name and index in the whole tensor; `scaler`, `groups` (what a loop can set
            of the parameter groups) and `step`. `torch.save` writes it rank by rank, for `torch.load` with
            its defaults; `torch.distributed.checkpoint.save` all ranks at once.

        Raises:
            VitsweepError: a parameter group holds what cannot be saved, such as a function.
        """
        self._refuse_within_averaged("state_dict")
        trainer = self.trainer
        held = state_dict_of(_shards(trainer))
        tensors = {key: tensor.detach().clone() for key, tensor in held.items()}
        return {"tensors": tensors, **numbers(trainer), "step": trainer.steps_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank, for the same model, techniques and ranks.

        Raises:
            VitsweepError: the state is of another model, or other techniques or ranks; nothing is changed.
        """
        self._refuse_within_averaged("load_state_dict")
        if missing := [key for key in ("tensors", "scaler", "groups", "step") if key not in state]:
            raise VitsweepError(
                f"The state has no `{missing[0]}`: load what `state_dict` of an applied model returned."
            )
        trainer, saved = self.trainer, state["tensors"]
        way_out = "load it with the model, techniques and ranks that saved it."
        own = state_dict_of(shards := _shards(trainer))
        for key, tensor in own.items():
            if OPTIMIZER not in key and (key not in saved or saved[key].shape != tensor.shape):
                raise VitsweepError(
                    f"The state does not hold `{key}` of shape {tuple(tensor.shape)}: {way_out}"
                )
        was_new = not trainer.optimizer.state
        if any(OPTIMIZER in key for key in saved):
            allocate_state(trainer.optimizer)
            own = state_dict_of(shards := _shards(trainer))
        if unknown := [key for key in saved if key not in own]:
            if was_new:
                trainer.optimizer.state.clear()
            raise VitsweepError(
                f"The state holds `{unknown[0]}`, and this cell does not: {way_out}"
            )
        for key, tensor in own.items():
            if key in saved:
                tensor.copy_(saved[key])
        give_extra_state(trainer.model, shards)
        names = {key.rpartition("@")[0] for key in saved}
        complete_loading(trainer, names, state["scaler"], state["groups"])
        trainer.steps_taken = state["step"]

    def close(self) -> None:
        """Give torch its flags back; leave the process group if `apply` joined it. Every rank calls it."""
        _PROCESS.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _PROCESS.leave(self, failed=error is not None)


def _on_any_rank(flag: bool, world: World) -> bool:
    if world.size == 1:
        return flag
    any_ = torch.tensor(float(flag), device=world.device)
    dist.all_reduce(any_, dist.ReduceOp.MAX)
    return bool(any_)


def _refuse_other_weights(model: "nn.Module", world: World) -> None:
    """Refuse a model whose weights or buffers differ between ranks: some shardings would train a mixture."""
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if world.size == 1 or not named:
        return
    sums = [  # of bytes: in whatever order they are added up
        p.detach().reshape(-1).contiguous().view(torch.uint8).sum(dtype=torch.int64)
        for p in named.values()
    ]
    largest = torch.stack([torch.stack(sums), -torch.stack(sums)]).to(world.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    same = (largest[0] == -largest[1]).tolist()
    if not all(same):
        raise VitsweepError(
            f"`{list(named)[same.index(False)]}` has other numbers on other ranks: give each rank the same "
            "weights, such as by `torch.manual_seed(0)` before the model is built."
        )


def _shards(trainer: Trainer) -> list[Shard]:
    flag = whole(f"rank{trainer.world.rank}{NON_FINITE}", trainer.non_finite)
    return [*shards_of_training(trainer), flag]


class _Process:
    """What all calls in this process share: flags of torch as they were, threads, the process group."""

    def __init__(self) -> None:
        self._users: list[Applied] = []
        self._flags, self._group = ExitStack(), ExitStack()
        atexit.register(self._flags.close)  # of a script that ends without `close`
        self._current: Applied | None = None

    def enter(self, user: Applied) -> World:
        """Join the ranks, where nobody has; note the flags, where nobody has changed them."""
        cell = user.cell
        if not self._users:
            self._flags.enter_context(process_flags_kept())
            self._flags.callback(torch.set_num_threads, torch.get_num_threads())
        self._users.append(user)
        self._current = user
        rank, local_rank, size = place()
        if not dist.is_initialized():
            unlimited = replace(cell, resources=replace(cell.resources, memory_gib_per_rank=None))
            method = init_method() if size > 1 else self._group.enter_context(rendezvous())
            joined = joined_process_group(unlimited, rank, local_rank, method)
            return self._group.enter_context(joined)
        torch.set_num_threads(cell.resources.threads_per_rank)
        return own_world(cell, rank, local_rank)

    def set_flags(self, user: Applied) -> None:
        """Give torch the flags of the cell, where another one has set its own since.

        Raises:
            VitsweepError: it is closed.
        """
        if not any(user is each for each in self._users):
            raise VitsweepError("This cell was closed: call `vitsweep.apply` for a new one.")
        if self._current is not user:
            set_process_flags(user.cell)
            torch.set_num_threads(user.cell.resources.threads_per_rank)
            self._current = user

    def leave(self, user: Applied, *, failed: bool = False) -> None:
        """Undo what `enter` did, once all have left; after an error no rank waits for the others."""
        if not any(user is each for each in self._users):
            return
        self._users = [each for each in self._users if each is not user]
        if self._current is user:
            self._current = None
        if self._users:
            return
        self._flags.close()
        if failed and user.world.size > 1:
            self._group.pop_all()
        self._group.close()


_PROCESS = _Process()


def _split(batch: Any, parts: int, device: Any) -> list[Any]:
    """Cut all tensors of a batch along the first axis, and move them to the device.

    Raises:
        VitsweepError: they have several lengths or too small a one, or there are texts.
    """
    texts = [keystr(path) for path, leaf in tree_leaves_with_path(batch) if isinstance(leaf, str)]
    if texts and parts > 1:
        raise VitsweepError(
            f"The batch holds a string at {texts[0]}, and only tensors can be cut into "
            f"`batch.accumulation_steps={parts}` parts: leave it out."
        )
    leaves = tree_leaves(batch)
    foreign = [x for x in leaves if getattr(x, "ndim", 0) and not isinstance(x, torch.Tensor)]
    lengths = sorted({len(t) for t in leaves if isinstance(t, torch.Tensor) and t.ndim})
    if foreign or not lengths:
        held = foreign or leaves or [None]
        raise BadValueError(
            f"The batch holds {described(held[0])} where a tensor is wanted: give tensors, such as by "
            "`torch.as_tensor`, in a tuple, a list or a dict."
        )
    if len(lengths) != 1 or lengths[0] < parts:
        raise VitsweepError(
            f"The tensors of the batch have lengths {lengths} along the first axis: they "
            f"must agree, and be at least `batch.accumulation_steps={parts}`. A loader with "
            "`drop_last=True` leaves a small last batch out."
        )

    def part(number: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.tensor_split(parts)[number] if tensor.ndim else tensor
            return own.to(device, non_blocking=True)

        return tree_map_only(torch.Tensor, cut, batch)

    return [part(number) for number in range(parts)]


def copied(module: nn.Module, device: str | torch.device = "meta") -> nn.Module:
    """Copy a module to a device, without its weights.

    Raises:
        BadValueError: its parameters have no shape yet.
        Exception: whatever a module raises that cannot be copied, as one that keeps results of operations.
    """
    if lazy := shapeless(module):
        raise BadValueError(f"The {type(module).__name__} {LAZY.format(listed(lazy))}")
    memo: dict[int, Any] = {
        id(b): torch.empty_like(b.detach(), device=device) for b in module.buffers()
    }
    memo |= {
        id(p): nn.Parameter(torch.empty_like(p.detach(), device=device), p.requires_grad)
        for p in module.parameters()
    }
    return deepcopy(module, memo)


def look_at_given(
    copy: nn.Module, cell: CellSpec, batch: Any = None, loss: Any = None
) -> tuple[Look, list[str]]:
    """Look at a module of which this is a copy; return what is seen, and why techniques cannot take it.

    Args:
        copy: of the module, see `copied`.
        cell: with its description.
        batch: that it is trained on; without one it is not run.
        loss: of outputs and batch.
    """
    spec: ModuleSpec = cell.model  # type: ignore[assignment]
    mark_blocks(find_blocks(copy, spec))
    look = look_at(deepcopy(copy).float(), tree_map_only(torch.Tensor, in_float32, batch), loss)
    return look, [*look_problems(spec, cell, look)]
