"""Plain training in one process without techniques: the reference that techniques must equal."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitsweep.model.build import build_model
from vitsweep.model.draws import Draws
from vitsweep.model.initialize import plain_name
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.techniques.precision.cast import autocast, cast_model
from vitsweep.training.trainer import MicroBatch
from vitsweep.training.update import parameter_groups


def plain_model(cell: CellSpec, device: torch.device) -> nn.Module:
    """Build the cell's model with plain attention and layout, from the cell's seed.

    Techniques that change the model (classifier, linear or segmented attention) stay: they are
    compared with a plain implementation of the same model.
    """
    torch.manual_seed(cell.seed)
    layout = replace(
        cell.layout, batch_first=True, channels_last=False, patch_embedding="convolution"
    )
    model: nn.Module = build_model(replace(cell, layout=layout))
    vars(model)["draws"] = Draws(cell.seed)
    for technique in cell.techniques.values():
        model = technique.plain_twin(model)
    return model.to(device)


def plain_losses(cell: CellSpec, batches: list[MicroBatch], device: torch.device) -> list[float]:
    """Train the plain model of a cell on whole global batches; return each step's loss."""
    return train_plain(plain_model(cell, device), cell, batches)


def train_plain(model: nn.Module, cell: CellSpec, batches: list[MicroBatch]) -> list[float]:
    """Train `model` with the cell's optimizer, in place; return the loss of each step.

    Float32, or float64 where the cell computes in it.
    """
    dtype = torch.float64 if cell.precision.plan().param_dtype == "float64" else torch.float32
    _cast(model, dtype)
    optimizer = cell.optimizer.build(parameter_groups(model, cell.optimizer.weight_decay))
    losses = []
    for step, (images, labels) in enumerate(batches):
        loss = _loss(cell, _outputs(cell, model, images.to(dtype), step), labels)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if cell.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cell.optimizer.clip_norm)
        optimizer.step()
    return losses


def plain_gradients(
    cell: CellSpec, batch: MicroBatch, device: torch.device, *, rounded: bool
) -> dict[str, Tensor]:
    """Return the plain model's gradients of the mean loss of a whole global batch, clipped.

    Args:
        cell: gives the model, its seed, and the norm to clip at.
        batch: images (B, C, H, W) and labels of all replicas.
        device: where to compute.
        rounded: compute in the cell's precision; otherwise in float32, or float64 where the cell does.
    """
    plan, model = cell.precision.plan(), plain_model(cell, device)
    images, labels = batch
    if rounded:
        model = cast_model(cell.precision.convert(model), plan, sharded_masters=False)
        images = images.to(getattr(torch, plan.param_dtype))
    else:
        plan = PrecisionPlan(param_dtype="float64" if plan.param_dtype == "float64" else "float32")
        _cast(model, getattr(torch, plan.param_dtype))
        images = images.to(getattr(torch, plan.param_dtype))
    with autocast(plan, device):
        outputs = _outputs(cell, model, images, step=0)
    _loss(cell, outputs.to(torch.promote_types(outputs.dtype, torch.float32)), labels).backward()
    if cell.optimizer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), cell.optimizer.clip_norm)
    return {plain_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors only; not by the code of the techniques, which is under test."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for tensor in [t for t in held.values() if t is not None]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
                elif tensor.is_complex() and dtype == torch.float64:
                    tensor.data = tensor.data.to(torch.complex128)


def _outputs(cell: CellSpec, model: nn.Module, images: torch.Tensor, step: int) -> torch.Tensor:
    """Run the whole batch; in the parts that ranks see where these matter.

    They do where a norm depends on its company, and where each forward pass has its own draws.
    """
    draws: Any = vars(model)["draws"]
    if not (cell.model.norms_over_batch or cell.vit_block.draws or cell.tokens.draws):
        return model(images)
    parts = cell.batch.accumulation_steps * cell.pipeline_parallel.microbatches
    outputs = []
    for replica, share in enumerate(images.chunk(cell.mesh.data_parallel_size)):
        draws.replica = replica
        draws.begin(step)
        outputs += [model(part) for part in share.chunk(parts)]
    return torch.cat(outputs)


def _loss(cell: CellSpec, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if cell.model.head == "dense":
        return F.mse_loss(outputs, labels.to(outputs.dtype))
    return F.cross_entropy(outputs, labels, label_smoothing=cell.task.label_smoothing)
