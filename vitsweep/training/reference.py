"""Plain training: one process, one replica, no technique. What every technique is held against."""

import torch
from torch.nn import functional as F

from vitsweep.model.vit import ViT
from vitsweep.optimizer.groups import parameter_groups
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainee import MicroBatch


def plain_model(cell: CellSpec, device: torch.device) -> ViT:
    """Build the cell's model with plain attention and layout, from the cell's seed.

    It has the cell's classifier, which changes the model: that is compared with its own plain twin.
    """
    torch.manual_seed(cell.seed)
    model = ViT(
        cell.model,
        resolution_px=cell.batch.resolution_px,
        pooling=cell.classifier.pooling,
        batch_first=True,
    )
    return model.to(device)


def plain_losses(cell: CellSpec, batches: list[MicroBatch], device: torch.device) -> list[float]:
    """Train on whole global batches with the cell's optimizer; return each step's loss.

    Float32, or float64 where the cell computes in it.
    """
    dtype = torch.float64 if cell.precision.plan().param_dtype == "float64" else torch.float32
    model = plain_model(cell, device).to(dtype)
    optimizer = cell.optimizer.build(parameter_groups(model, cell.optimizer.weight_decay))
    losses = []
    for images, labels in batches:
        loss = _loss(cell, model(images.to(dtype)), labels)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if cell.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cell.optimizer.clip_norm)
        optimizer.step()
    return losses


def _loss(cell: CellSpec, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if cell.model.head == "dense":
        return F.mse_loss(outputs, labels.to(outputs.dtype))
    return F.cross_entropy(outputs, labels, label_smoothing=cell.task.label_smoothing)
