"""One rank of a proof: train from given weights on given batches, and write what came of it.

It is started with the folder of each exported file, and needs torch alone.
`export.cell_rank` starts the product's side with the same loop.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, MOST_STEPS = 4, 24
"""Updates that are compared, and steps that may be taken for them: overflows skip the first ones."""

Named = dict[str, Tensor]


class Side(Protocol):
    """What is compared: an exported file, or the product."""

    device: torch.device

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch of this rank; return its mean loss."""

    def updates(self) -> int:
        """Return how many steps changed the weights."""

    def gradients(self) -> Named:
        """Return whole gradients of the last update, unscaled and clipped."""

    def weights(self) -> Named:
        """Return whole weights and buffers as the forward pass reads them."""

    def masters(self) -> Named:
        """Return whole weights as the optimizer updates them."""


class ExportedFile:
    """The exported file as its own `main` uses it."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.spec_from_file_location("exported", folder / "train.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["exported"] = module
        spec.loader.exec_module(module)
        if dist.is_initialized():  # by the file of an earlier folder
            dist.init_process_group = lambda *_, **__: None
        self.device = module.start()
        model = module.build_model()
        model.load_state_dict(torch.load(folder / "init.pt", weights_only=True))
        self._training = module.Training(model, self.device)
        self._count, self._gradients = 0, Named()
        self._training.optimizer.register_step_pre_hook(self._keep)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch of this rank; return its mean loss."""
        loss: Tensor = self._training.step(images, labels)
        return loss

    def updates(self) -> int:
        """Return how many steps changed the weights."""
        return self._count

    def gradients(self) -> Named:
        """Return whole gradients of the last update."""
        return self._gradients

    def weights(self) -> Named:
        """Return whole weights and buffers."""
        return {name: _whole(tensor) for name, tensor in self._training.weights().items()}

    def masters(self) -> Named:
        """Return whole weights as the optimizer updates them."""
        return {n: _whole(p) for n, p in self._updated()}

    def _keep(self, *_: Any) -> None:
        self._count += 1
        found = {n: p.grad for n, p in self._updated() if p.grad is not None}
        self._gradients = {name: _whole(gradient) for name, gradient in found.items()}

    def _updated(self) -> list[tuple[str, Any]]:
        """Return what the optimizer updates by name; DTensors where it updates their parts."""
        parameters = dict(self._model().named_parameters())
        groups = self._training.optimizer.param_groups
        pairs = [p for g in groups for p in zip(g["param_names"], g["params"], strict=True)]
        sharded = {n for n, p in parameters.items() if hasattr(p, "full_tensor")}
        return [(n, parameters[n] if n in sharded else tensor) for n, tensor in pairs]

    def _model(self) -> nn.Module:
        """Return the model inside of DDP, whose names are those of the reference model."""
        model: nn.Module = self._training.model
        return model.module if isinstance(model, DistributedDataParallel) else model


def _whole(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


def run(open_side: Callable[[Path], Side], folders: list[Path], name: str) -> None:
    """Train in each folder, and let rank 0 write `NAME.pt`.

    Args:
        open_side: builds the side of a folder; it joins the other ranks.
        folders: with `batches.pt`.
        name: of the side.
    """
    for number, folder in enumerate(folders):
        if number:  # after some compilations of one function torch would run it uncompiled
            torch.compiler.reset()
        side = open_side(folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        batches = _own_batches(side, folder)
        losses: list[float] = []
        while side.updates() < STEPS and len(losses) < MOST_STEPS:
            losses.append(float(side.step(*batches[len(losses) % len(batches)])))
        found = {kind: getattr(side, kind)() for kind in ("gradients", "weights", "masters")}
        if rank == 0:
            torch.save({"losses": losses, **found}, folder / f"{name}.pt")
        if dist.is_initialized():
            dist.barrier()


def _own_batches(side: Side, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's share of each batch."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [
        (images.chunk(ranks)[rank].to(side.device), labels.chunk(ranks)[rank].to(side.device))
        for images, labels in torch.load(folder / "batches.pt", weights_only=True)
    ]


def leave() -> None:
    """End this process once all ranks have come here, without running exit handlers.

    A thread of gloo that lets go of a tensor while the interpreter ends aborts the process.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.modules["vitsweep"] = None  # type: ignore[assignment]  # importing it fails
    run(ExportedFile, [Path(word) for word in sys.argv[1:]], "file")
    leave()
