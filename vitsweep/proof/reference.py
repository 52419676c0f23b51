"""Reference training in one process without techniques, which techniques must equal."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vitsweep.model.block import NORMS
from vitsweep.model.build import build_model
from vitsweep.model.initialize import Draws, draw_zeros, plain_name
from vitsweep.model.module_look import inputs_of, is_writable
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.precision import autocast
from vitsweep.objectives.base import (
    Batch,
    OpenObjective,
    Pair,
    Step,
    as_entries,
    at_least_float32,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import MicroBatch

LEAST_SHARES, MOST_SHARES = 8, 64
"""Different shares of a batch: of 2,048 replicas, the reference model would compute 8,192 images at once."""
FIRST_SCALE = 2.0**16
"""Of a dynamic loss scale; here each halves until no gradient overflows."""

ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""
HALF = (torch.float16, torch.bfloat16)
ROUNDED = 1000
"""So many times the distance from 1 to the next number sums in another order may differ, relatively."""


def plain_model(cell: CellSpec, device: torch.device) -> nn.Module:
    """Build the cell's model with reference attention and layout, from the cell's seed.

    Techniques that change the model (classifier, linear or segmented attention) stay: they are
    compared with a reference implementation of the same model. Of a module of the user's, tensors that
    begin at zero are drawn (see `draw_zeros`).
    """
    torch.manual_seed(cell.seed)
    layout = replace(
        cell.layout, batch_first=True, channels_last=False, patch_embedding="convolution"
    )
    # The generator of the device draws the cell's own weights; a user's module draws on the host.
    with nullcontext() if isinstance(cell.model, ModuleSpec) else device:
        model: nn.Module = build_model(replace(cell, layout=layout), of_reference=True)
    if isinstance(cell.model, ModuleSpec):
        draw_zeros(model, cell.seed)
    vars(model)["draws"] = Draws(cell.seed)
    for technique in cell.techniques.values():
        model = technique.plain_twin(model)
    return model.to(device)


@dataclass(frozen=True)
class PlainStep:
    """What the reference model gives for a global batch.

    Attributes:
        loss: mean over all images, float64.
        gradients: of it, unscaled and clipped, by the reference model's names.
        buffers: as the forward passes of the first replica leave them.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class PlainModel:
    """A cell's reference model in the cell's own precision, without any code of its techniques.

    Args:
        cell: gives the model, its seed, the precision, and the norm at which gradients are clipped.
        device: where to compute.
        in_parts: compute a batch in the parts that ranks see; by default as `is_cut` says.
        model: on the device, in place of the cell's.
    """

    def __init__(
        self,
        cell: CellSpec,
        device: torch.device,
        in_parts: bool | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._cell, self._device = cell, device
        self._in_parts = is_cut(cell) if in_parts is None else in_parts
        self.model, self._plan = model or plain_model(cell, device), cell.precision.plan()
        self.objective: OpenObjective = cell.objective.open(cell).reference()
        self._dtype = getattr(torch, self._plan.param_dtype)
        norms = [m for m in self.model.modules() if isinstance(m, NORMS)]
        _cast(self.model, self._dtype)
        for norm in norms:
            _cast(norm, getattr(torch, self._plan.norm_dtype))
            if isinstance(norm, nn.LayerNorm) and self._dtype in HALF:
                is_half = getattr(torch, self._plan.norm_dtype) in HALF
                if type(norm).forward is nn.LayerNorm.forward:
                    vars(norm)["forward"] = partial(_norm_with_wide_sums, norm, is_half)
                elif not is_half:  # a class that normalises other axes
                    vars(norm)["forward"] = partial(_own_norm_in_float32, norm)

    def step(
        self,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: MicroBatch,
        step: int,
        teacher: dict[str, Tensor] | None = None,
        replica: int = 0,
    ) -> PlainStep:
        """Compute one step at given weights and buffers, which are cast to the precision of the model.

        A teacher's weights, where the objective has one, see the batch first. The batch begins with the
        images of a replica, whose random numbers they get.
        """
        scale = FIRST_SCALE if (own := self._plan.loss_scale) == "dynamic" else own or 1.0
        # A replica's mean has larger gradients than the mean of all: float16 rounds small ones more.
        scale *= 2.0 ** (shares_of(self._cell).bit_length() - 1)
        given, at = as_entries(batch), step_of_all(self._cell, batch, step)
        with _disable_current_modes():  # rounding noise might choose another mask
            prepared = self.objective.prepare(given, at)
        if teacher:
            self._load(teacher)
            with torch.no_grad(), autocast(self._plan, self._device):
                taught = _outputs(self.model, self.objective.of_teacher(prepared), self._dtype)
            prepared = {**prepared, "teacher": tree_map_only(Tensor, at_least_float32, taught)}
        while True:
            self._load(weights)
            self.model.zero_grad()
            loss, left = self._loss(prepared, buffers, step, replica)
            (loss * scale).backward()
            gradients = self._gradients(scale)
            if scale < 1 or all(bool(g.isfinite().all()) for g in gradients.values()):
                return PlainStep(loss.detach().double(), gradients, left)
            scale /= 2

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.named_parameters().items():
            parameter.copy_(weights[name].view(parameter.shape))

    def _gradients(self, scale: float) -> dict[str, Tensor]:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        held = {n: p.grad for n, p in self.named_parameters().items() if p.grad is not None}
        found = {n: g.to(torch.promote_types(g.dtype, wide)) / scale for n, g in held.items()}
        if (limit := self._cell.optimizer.clip_norm) is not None:
            squares = [g.abs().double().square().sum() for g in found.values()]
            norm = torch.stack(squares).sum().sqrt()
            share = min(1.0, limit / (float(norm) + 1e-6))
            found = {n: g * share for n, g in found.items()}
        return found

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the reference model."""
        return {plain_name(n): p for n, p in self.model.named_parameters()}

    def _named_buffers(self) -> dict[str, Tensor]:
        return {plain_name(n): b for n, b in self.model.named_buffers()}

    def _loss(
        self, batch: Batch, buffers: dict[str, Tensor], step: int, first: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run each replica's share from the given buffers, which all have when a step begins."""
        losses, left, mode = [], dict[str, Tensor](), partial(autocast, self._plan, self._device)
        cell, objective = self._cell, self.objective
        at = step_of_all(cell, batch, step)
        shares = cut(batch, shares_of(cell) if self._in_parts else 1)
        for replica, share in enumerate(shares, first):
            for name, buffer in self._named_buffers().items():
                given = buffers.get(name, buffer).to(buffer.dtype)
                if is_writable(buffer) and not torch.equal(buffer, given):
                    buffer.data = given.clone()  # an earlier share's graph may hold what was there
            found = _loss_of_replica(
                objective, self.model, share, self._dtype, at, replica, mode, self._in_parts
            )
            losses.append(found)
            left = left or {name: b.clone() for name, b in self._named_buffers().items()}
        whole = torch.stack(losses)
        if objective.reduction == "sum":
            return whole.sum() / objective.count(batch), left
        return whole.mean(), left


def step_of_all(cell: CellSpec, batch: Any, step: int) -> Step:
    """Return the place of a batch of all replicas in a step of a proof."""
    leaf = next(leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
    return Step(
        seed=cell.seed, number=step, total=None, first=0, num_images=len(leaf), device=leaf.device
    )


def _norm_with_wide_sums(norm: nn.LayerNorm, is_half: bool, x: Tensor) -> Tensor:
    """Normalise in float32 by float32 weights; by those in half, sum their gradients in float32 alone.

    torch's kernel for half precision sums them in it on a CPU.
    """
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    if not is_half:
        return F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    if weight is None:
        return F.layer_norm(x, shape, eps=eps)
    fixed = None if bias is None else bias.detach()
    normed = F.layer_norm(x, shape, weight.detach(), fixed, eps)
    scaled = F.layer_norm(x.detach().float(), shape, eps=eps) * weight.float()
    if bias is not None:
        scaled = scaled + bias.float()
    return normed + (scaled - scaled.detach()).to(x.dtype)  # zeros, with these gradients


def _own_norm_in_float32(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return type(norm).forward(norm, x.float()).to(x.dtype)


SELECTIONS = ("amax", "amin", "aminmax", "max", "min", "median", "nanmedian")
"""Round nothing, and their backward pass looks for the element that equals the result."""


class RoundingNoise(TorchDispatchMode):
    """Context in which the result of every operation moves to a neighbouring number, or stays, at random.

    A result y becomes y (1 + e), rounded, with e uniform within the unit roundoff of its dtype. What
    that does to a gradient is as large as, or up to twice, what rounding itself does.

    Args:
        seed: of the random numbers.
        least: roundoff of operations that the device runs in fewer digits than their dtype has (TF32).
    """

    def __init__(self, seed: int, least: float = 0.0) -> None:
        super().__init__()
        self._least = least
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; leave views, selections and what is written in place as they are."""
        results = func(*args, **(kwargs or {}))
        selects = func.overloadpacket.__name__ in SELECTIONS
        if selects or any(each.alias_info for each in func._schema.returns):
            return results
        if isinstance(results, Tensor):
            return self._moved(results)
        if isinstance(results, tuple | list):
            return type(results)(self._moved(r) if isinstance(r, Tensor) else r for r in results)
        return results

    def _moved(self, exact: Tensor) -> Tensor:
        if exact.is_complex():
            return torch.view_as_complex(self._moved(torch.view_as_real(exact.resolve_conj())))
        if exact.dtype not in ROUNDOFF or not exact.numel():
            return exact
        size = max(ROUNDOFF[exact.dtype], self._least)
        wide = exact.to(torch.promote_types(exact.dtype, torch.float32))
        if exact.device not in self._generators:
            generator = torch.Generator(exact.device).manual_seed(self._seed)
            self._generators[exact.device] = generator
        noise = torch.empty_like(wide).uniform_(
            -size, size, generator=self._generators[exact.device]
        )
        moved = torch.addcmul(wide, wide, noise).to(exact.dtype)
        return torch.where(moved.isfinite(), moved, exact)  # a mask holds -inf, or the least number


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors only; not by the code of the techniques, which is under test."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for tensor in [t for t in held.values() if t is not None]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
                elif tensor.is_complex() and dtype == torch.float64:
                    tensor.data = tensor.data.to(torch.complex128)


def is_cut(cell: CellSpec) -> bool:
    """Whether the batch is computed in the parts that ranks see.

    It is where a norm depends on its company, where each forward pass has its own draws, and where there are
    two parts: a sum of two has one order, so that gradients are those of the ranks to the last bit.
    """
    parts = shares_of(cell) * cell.batch.accumulation_steps * cell.pipeline_parallel.microbatches
    if cell.objective.couples_images:
        return False
    return parts == 2 or cell.model.norms_over_batch or cell.vit_block.draws or cell.tokens.draws


def shares_of(cell: CellSpec) -> int:
    """Return into how many different shares a batch is cut for the replicas of a twin.

    More than `MOST_SHARES` replicas compute some shares several times, each equally often, so that the
    reference model, which computes each once, has the same mean. Replicas with draws of their own do not.
    """
    replicas, objective = cell.mesh.data_parallel_size, cell.objective
    draws = cell.vit_block.draws or cell.tokens.draws or objective.draws or objective.couples_images
    if replicas <= MOST_SHARES or draws:
        return replicas
    found = (n for n in range(LEAST_SHARES, MOST_SHARES + 1) if replicas % n == 0)
    return max(found, default=replicas)


def cut(batch: Any, parts: int) -> list[Any]:
    """Cut all tensors of a batch along the first axis into equal parts, in order."""
    leaves, tree = tree_flatten(batch)
    cuts = [leaf.chunk(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(part), tree) for part in zip(*cuts, strict=True)]


def _loss_of_replica(
    objective: OpenObjective,
    model: nn.Module,
    share: Batch,
    dtype: torch.dtype,
    at: Step,
    replica: int,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
    in_parts: bool | None = None,
) -> Tensor:
    """Return the mean over the micro-batches of a replica; of the whole batch where it is not cut.

    Of a loss that is a sum it is the sum. `in_parts` is as in `PlainModel`.
    """
    cell = objective.cell
    draws: Any = vars(model)["draws"]
    draws.replica = replica
    draws.begin(at.number)
    parts = cell.batch.accumulation_steps * cell.pipeline_parallel.microbatches
    losses = []
    pieces = cut(share, parts if (is_cut(cell) if in_parts is None else in_parts) else 1)
    device = next(model.parameters()).device
    with draws.default_generators(device) if cell.model.draws_by_itself else nullcontext():
        for part in pieces:
            with mode():
                outputs = _outputs(model, part, dtype)
            wide = tree_map_only(Tensor, at_least_float32, outputs)
            losses.append(objective.loss(wide, part, at))
    found = torch.stack(losses)
    return found.sum() if objective.reduction == "sum" else found.mean()


def _outputs(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(batch, Pair):
        return model(batch["image"].to(dtype))
    return model(**tree_map_only(Tensor, cast, inputs_of(model, batch)))


@torch.no_grad()
def look_at_parts(
    cell: CellSpec, device: torch.device, batches: Iterable[MicroBatch], parts: int
) -> tuple[bool, bool]:
    """Return whether a module gives of batches what it gives of parts, and its loss of them that over parts.

    A module that writes buffers, and a loss that draws random numbers, do not give the same. The loss over
    parts is the mean of means, or the sum of sums, on the outputs of the whole batch where these have an axis
    of images. A mean is compared with that over single images too, since parts may count alike by chance.
    """
    model, dtype = plain_model(cell, device), getattr(torch, cell.precision.plan().param_dtype)
    _cast(model, dtype)
    objective = cell.objective.open(cell).reference()
    before = [buffer.clone() for buffer in model.buffers()]
    alike = adds_up = True
    for batch in map(as_entries, batches):
        at = step_of_all(cell, batch, 0)
        whole, cuts = _wide_outputs(model, batch, dtype), cut(batch, parts)
        images = len(tree_flatten(batch)[0][0])
        tensors = (leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor))
        has_axis = all(tensor.shape[:1] == (images,) for tensor in tensors)
        seen = cut(whole, parts) if has_axis else None
        if not seen or (alike and parts > 1):
            own = [_wide_outputs(model, part, dtype) for part in cuts]
            alike = alike and seen is not None and _all_close(seen, own)
            seen = seen or own
        loss = objective.loss(whole, batch, at)
        if not _close(objective.loss(whole, batch, at), loss):  # it draws
            alike = False
            continue
        adds_up = adds_up and _close(_over_parts(objective, seen, cuts, at), loss)
        if has_axis and objective.reduction != "sum":
            try:
                single = _over_parts(objective, cut(whole, images), cut(batch, images), at)
            except Exception:  # of the user's loss, which needs several images
                adds_up = False
            else:
                adds_up = adds_up and _close(single, loss)
    return alike and all(map(torch.equal, before, model.buffers())), adds_up


def _wide_outputs(model: nn.Module, batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, at_least_float32, _outputs(model, batch, dtype))


def _over_parts(
    objective: OpenObjective, outputs: list[Any], batches: list[Batch], at: Step
) -> Tensor:
    """Return the mean of the losses of parts; of a loss that is a sum their sum."""
    pairs = zip(outputs, batches, strict=True)
    losses = torch.stack([objective.loss(out, batch, at) for out, batch in pairs])
    return losses.sum() if objective.reduction == "sum" else losses.mean()


def _all_close(these: Any, those: Any) -> bool:
    pairs = zip(tree_flatten(these)[0], tree_flatten(those)[0], strict=True)
    return all(_close(a, b) for a, b in pairs if isinstance(a, Tensor))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by no more than sums in another order."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool((a - b).norm() <= ROUNDED * torch.finfo(a.dtype).eps * b.norm())
