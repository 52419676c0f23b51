"""Reference training in one process without techniques, which techniques must equal."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vitsweep.model.block import NORMS
from vitsweep.model.build import build_model
from vitsweep.model.initialize import Draws, plain_name
from vitsweep.model.module_look import inputs_of, is_writable, logits_of
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.precision import autocast
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import MicroBatch, at_least_float32, labels_of

LEAST_SHARES, MOST_SHARES = 8, 64
"""Different shares of a batch: of 2,048 replicas, the reference model would compute 8,192 images at once."""
FIRST_SCALE = 2.0**16
"""Of a dynamic loss scale, which halves until no gradient overflows."""

ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""
HALF = (torch.float16, torch.bfloat16)
ROUNDED = 1000
"""So many times the distance from 1 to the next number sums in another order may differ, relatively."""


def plain_model(cell: CellSpec, device: torch.device) -> nn.Module:
    """Build the cell's model with reference attention and layout, from the cell's seed.

    Techniques that change the model (classifier, linear or segmented attention) stay: they are
    compared with a reference implementation of the same model.
    """
    torch.manual_seed(cell.seed)
    layout = replace(
        cell.layout, batch_first=True, channels_last=False, patch_embedding="convolution"
    )
    # The generator of the device draws the cell's own weights; a user's module draws on the host.
    with nullcontext() if isinstance(cell.model, ModuleSpec) else device:
        model: nn.Module = build_model(replace(cell, layout=layout))
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
    """

    def __init__(self, cell: CellSpec, device: torch.device, in_parts: bool | None = None) -> None:
        self._cell, self._device = cell, device
        self._in_parts = is_cut(cell) if in_parts is None else in_parts
        self.model, self._plan = plain_model(cell, device), cell.precision.plan()
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
        self, weights: dict[str, Tensor], buffers: dict[str, Tensor], batch: MicroBatch, step: int
    ) -> PlainStep:
        """Compute one step at given weights and buffers, which are cast to the precision of the model."""
        scale = self._plan.loss_scale
        scale = FIRST_SCALE if scale == "dynamic" else scale or 1.0
        while True:
            with torch.no_grad():
                for name, parameter in self.named_parameters().items():
                    parameter.copy_(weights[name].view(parameter.shape))
            self.model.zero_grad()
            loss, left = self._loss(batch, buffers, step)
            (loss * scale).backward()
            gradients = self._gradients(scale)
            if self._plan.loss_scale != "dynamic" or scale < 1 or _all_finite(gradients):
                return PlainStep(loss.detach().double(), gradients, left)
            scale /= 2

    def _gradients(self, scale: float) -> dict[str, Tensor]:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        held = {n: p.grad for n, p in self.named_parameters().items() if p.grad is not None}
        found = {n: g.to(wide) / scale for n, g in held.items()}
        if (limit := self._cell.optimizer.clip_norm) is not None:
            norm = torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt()
            share = min(1.0, limit / (float(norm) + 1e-6))
            found = {n: g * share for n, g in found.items()}
        return found

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the reference model."""
        return {plain_name(n): p for n, p in self.model.named_parameters()}

    def _named_buffers(self) -> dict[str, Tensor]:
        return {plain_name(n): b for n, b in self.model.named_buffers()}

    def _loss(
        self, batch: MicroBatch, buffers: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run each replica's share, the first one from the given buffers."""
        for name, buffer in self._named_buffers().items():
            if name in buffers and is_writable(buffer):
                buffer.copy_(buffers[name])
        losses, left, mode = [], dict[str, Tensor](), partial(autocast, self._plan, self._device)
        cell, count = self._cell, self._cell.model.own_count()
        for replica, share in enumerate(cut(batch, shares_of(cell) if self._in_parts else 1)):
            found = _loss_of_replica(
                cell, self.model, share, self._dtype, step, replica, mode, self._in_parts
            )
            losses.append(found)
            left = left or {name: b.clone() for name, b in self._named_buffers().items()}
        whole = torch.stack(losses)
        return whole.sum() / count(batch) if count else whole.mean(), left


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
    found: Tensor = type(norm).forward(norm, x.float())
    return found.to(x.dtype)


def _all_finite(gradients: dict[str, Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients.values())


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
    return parts == 2 or cell.model.norms_over_batch or cell.vit_block.draws or cell.tokens.draws


def shares_of(cell: CellSpec) -> int:
    """Return into how many different shares a batch is cut for the replicas of a twin.

    More than `MOST_SHARES` replicas compute some shares several times, each equally often, so that the
    reference model, which computes each once, has the same mean. Replicas with draws of their own do not.
    """
    replicas = cell.mesh.data_parallel_size
    if replicas <= MOST_SHARES or cell.vit_block.draws or cell.tokens.draws:
        return replicas
    found = (n for n in range(LEAST_SHARES, MOST_SHARES + 1) if replicas % n == 0)
    return max(found, default=replicas)


def cut(batch: MicroBatch, parts: int) -> list[MicroBatch]:
    """Cut all tensors of a batch along the first axis into equal parts, in order."""
    leaves, tree = tree_flatten(batch)
    cuts = [leaf.chunk(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(part), tree) for part in zip(*cuts, strict=True)]


def _loss_of_replica(
    cell: CellSpec,
    model: nn.Module,
    share: MicroBatch,
    dtype: torch.dtype,
    step: int,
    replica: int,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
    in_parts: bool | None = None,
) -> Tensor:
    """Return the mean over the micro-batches of a replica; of the whole batch where it is not cut.

    Of a loss that is a sum it is the sum. `in_parts` is as in `PlainModel`.
    """
    draws: Any = vars(model)["draws"]
    draws.replica = replica
    draws.begin(step)
    parts = cell.batch.accumulation_steps * cell.pipeline_parallel.microbatches
    losses = []
    pieces = cut(share, parts if (is_cut(cell) if in_parts is None else in_parts) else 1)
    device = next(model.parameters()).device
    with draws.default_generators(device) if cell.model.draws_by_itself else nullcontext():
        for part in pieces:
            with mode():
                outputs = _outputs(model, part, dtype)
            losses.append(_loss(cell, tree_map_only(Tensor, at_least_float32, outputs), part))
    found = torch.stack(losses)
    return found.sum() if cell.model.own_count() else found.mean()


def _outputs(model: nn.Module, batch: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(batch, Mapping):
        return model(**tree_map_only(Tensor, cast, inputs_of(model, batch)))
    return model(batch[0].to(dtype))


def _loss(cell: CellSpec, outputs: Any, batch: MicroBatch) -> Tensor:
    if own := cell.model.own_loss():
        return cast(Tensor, own(outputs, batch))
    labels = labels_of(cell, batch)
    return F.cross_entropy(logits_of(outputs), labels, label_smoothing=cell.task.label_smoothing)


@torch.no_grad()
def look_at_parts(
    cell: CellSpec, device: torch.device, batch: MicroBatch, parts: int
) -> tuple[bool, bool]:
    """Return whether a module gives of a batch what it gives of its parts, and its loss that over the parts.

    A module that writes buffers does not give the same. The loss over parts is the mean of means, or the sum
    of sums, on the outputs of the whole batch where these have an axis of images.
    """
    model, dtype = plain_model(cell, device), getattr(torch, cell.precision.plan().param_dtype)
    _cast(model, dtype)
    before = [buffer.clone() for buffer in model.buffers()]
    cuts = cut(batch, parts)
    whole, *own = (
        tree_map_only(Tensor, at_least_float32, _outputs(model, part, dtype))
        for part in (batch, *cuts)
    )
    still = all(map(torch.equal, before, model.buffers()))
    images = len(tree_flatten(batch)[0][0])
    tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor)]
    has_axis = all(tensor.shape[:1] == (images,) for tensor in tensors)
    seen = cut(whole, parts) if has_axis else own
    pairs = zip(tree_flatten(seen)[0], tree_flatten(own)[0], strict=True)
    alike = has_axis and still and all(_close(a, b) for a, b in pairs if isinstance(a, Tensor))
    losses = torch.stack([_loss(cell, o, p) for o, p in zip(seen, cuts, strict=True)])
    over_parts = losses.sum() if cell.model.own_count() else losses.mean()
    return alike, _close(over_parts, _loss(cell, whole, batch))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by no more than sums in another order."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a - b).norm() <= ROUNDED * torch.finfo(a.dtype).eps * b.norm())
