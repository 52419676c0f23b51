"""Accuracy on held-out images, each counted once over all ranks."""

import torch
import torch.distributed as dist

from vitsweep.spec.technique import Batches
from vitsweep.training.trainer import Trainer


def accuracy_top1(trainer: Trainer, batches: Batches) -> float:
    """Return the share of held-out images whose highest logit is their label.

    Every replica has the same number of test batches: a forward pass of a sharded model gathers
    parameters from all ranks.
    """
    right_and_seen = torch.zeros(2, device=trainer.world.device, dtype=torch.float64)
    trainer.model.eval()
    for images, labels in batches.test():
        right_and_seen[0] += (trainer.predict(images).argmax(-1) == labels).sum()
        right_and_seen[1] += len(labels)
    trainer.model.train()
    if dist.is_initialized():
        dist.all_reduce(right_and_seen)  # ranks that share an image count it equally often
    return float(right_and_seen[0] / right_and_seen[1])
