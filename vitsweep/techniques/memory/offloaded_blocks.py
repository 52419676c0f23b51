"""Blocks whose saved activations wait on the host (needs torch; imported when applied).

While a block computes, what the block before it saved is copied to the host; while a block's backward
pass computes, what the block before it needs next is copied back. On a GPU both directions have a stream of
their own: the streams and the computation wait for each other by events, and the host waits for nothing.
Other devices copy in line.

As in torchtune's `OffloadActivations` a tensor is let go only once the computation has been made to wait
for its copy, so that its memory is reused in the order of the computation. `Tensor.record_stream` would
keep it until the host sees the copy end, which is many blocks later.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vitsweep.model.block import blocks_of, swap_block_class

Copy = tuple[Tensor, Tensor]
"""Target and source."""


class CopyLane:
    """Copies in one direction, on a stream of their own where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, copies: Iterable[Copy]) -> torch.cuda.Event | None:
        """Copy after everything that the computation has been given so far.

        Returns:
            What `wait` takes; None where the copies are made already.
        """
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the computation go on only after the copies that `copy` returned `event` for."""
        if event is not None:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_event(event)


class SavedTensor:
    """One tensor that a block saved; autograd holds it until the backward pass has read it.

    Attributes:
        saves: all that the same pass of the block saved.
        device: where the backward pass needs the tensor.
        on_device: the tensor; None while it is on the host alone.
        on_host: its copy; None before it is sent.
    """

    def __init__(self, saves: "BlockSaves", tensor: Tensor) -> None:
        self.saves, self.device = saves, tensor.device
        self.on_device: Tensor | None = tensor.detach()
        self.on_host: Tensor | None = None


class BlockSaves:
    """What one forward pass of one block saved; alive as long as one of its tensors is.

    Attributes:
        earlier: what the block that ran before this one saved, if that is still needed.
        sent: of the copies to the host; None before they are made, or where nothing is to be awaited.
        returned: of the copies back, likewise.
        is_on_device: False between the end of the copies to the host and the beginning of those back.
    """

    def __init__(self, earlier: "BlockSaves | None") -> None:
        self._tensors: list[weakref.ref[SavedTensor]] = []
        self._earlier = weakref.ref(earlier) if earlier else None
        self.sent: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None
        self.is_on_device = True

    @property
    def earlier(self) -> "BlockSaves | None":
        """What the block before saved; None where the backward pass has read it."""
        return self._earlier() if self._earlier else None

    def add(self, tensor: Tensor) -> SavedTensor:
        """Add a tensor that autograd saves."""
        saved = SavedTensor(self, tensor)
        self._tensors.append(weakref.ref(saved))
        return saved

    def tensors(self) -> list[SavedTensor]:
        """Return those that the backward pass has not read."""
        return [saved for each in self._tensors if (saved := each()) is not None]


class Offloading:
    """The copies of all blocks of a model, in the order in which the blocks run."""

    def __init__(self) -> None:
        self._latest: weakref.ref[BlockSaves] | None = None
        self._lanes: tuple[CopyLane, CopyLane] | None = None

    def begin_block(self) -> BlockSaves:
        """Send what the latest block saved, and let go what the one before it sent.

        At most two blocks have their activations on the device: the one that computes and the latest.
        The last block of a pass is never sent where its backward pass comes next.
        """
        latest = self._latest() if self._latest else None
        if latest is not None:
            if latest.earlier is not None:
                self._let_go(latest.earlier)
            self._send(latest)
        saves = BlockSaves(latest)
        self._latest = weakref.ref(saves)
        return saves

    def read(self, saved: SavedTensor) -> Tensor:
        """Return a tensor to the backward pass; begin to bring back what the block before saved."""
        saves, earlier = saved.saves, saved.saves.earlier
        self._bring_back(saves)
        if saves.returned is not None:
            self._to_device(saved.device).wait(saves.returned)
            saves.returned = None  # one wait for all tensors of the block
        if earlier is not None:
            self._bring_back(earlier)
        assert saved.on_device is not None
        return saved.on_device

    def _send(self, saves: BlockSaves) -> None:
        tensors = saves.tensors()
        if not tensors or not saves.is_on_device or tensors[0].on_host is not None:
            return  # nothing, or on the host already
        copies = []
        for saved in tensors:
            assert saved.on_device is not None
            saved.on_host = _on_host(saved.on_device)
            copies.append((saved.on_host, saved.on_device))
        saves.sent = self._to_host(tensors[0].device).copy(copies)

    def _let_go(self, saves: BlockSaves) -> None:
        tensors = [saved for saved in saves.tensors() if saved.on_host is not None]
        if not tensors or not saves.is_on_device:
            return
        self._to_host(tensors[0].device).wait(saves.sent)
        self._to_device(tensors[0].device).wait(saves.returned)  # nothing is freed under a copy
        saves.is_on_device, saves.returned = False, None
        for saved in tensors:
            saved.on_device = None

    def _bring_back(self, saves: BlockSaves) -> None:
        if saves.is_on_device:
            return
        copies = []
        for saved in saves.tensors():
            assert saved.on_host is not None
            saved.on_device = torch.empty_like(saved.on_host, device=saved.device)
            copies.append((saved.on_device, saved.on_host))
        saves.is_on_device = True
        if copies:
            saves.returned = self._to_device(copies[0][0].device).copy(copies)

    def _to_host(self, device: torch.device) -> CopyLane:
        return self._both(device)[0]

    def _to_device(self, device: torch.device) -> CopyLane:
        return self._both(device)[1]

    def _both(self, device: torch.device) -> tuple[CopyLane, CopyLane]:
        if self._lanes is None:
            self._lanes = CopyLane(device), CopyLane(device)
        return self._lanes


class OffloadedBlock(nn.Module):
    """A block that saves its activations on the host; its parameters stay where they are.

    Attributes:
        offloading: shared by the blocks of a model.
    """

    offloading: Offloading

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Transform the inputs."""
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **named)
        saves, device = self.offloading.begin_block(), next(self.parameters()).device

        def save(tensor: Tensor) -> Tensor | SavedTensor:
            # Kernels of attention save their random state on the host.
            if tensor.device != device or _comes_from_parameter(tensor):
                return tensor
            return saves.add(tensor)

        def read(saved: Tensor | SavedTensor) -> Tensor:
            return saved if isinstance(saved, Tensor) else self.offloading.read(saved)

        with saved_tensors_hooks(save, read):
            return super().forward(*inputs, **named)


def _on_host(tensor: Tensor) -> Tensor:
    """Return memory for a copy; pinned, so that copies run beside the host. torch caches it between steps."""
    return torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _comes_from_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, or a view or a cast of one (as under autocast).

    Its history is then a chain of functions of one input, down to where gradients accumulate.
    """
    function = tensor.grad_fn
    if function is None:
        return isinstance(tensor, nn.Parameter)
    while function is not None and len(function.next_functions) == 1:
        function = function.next_functions[0][0]
    return function is not None and function.name() == "torch::autograd::AccumulateGrad"


def offloaded(model: nn.Module) -> nn.Module:
    """Save the activations of every block on the host."""
    offloading = Offloading()
    for block in blocks_of(model):
        vars(block)["offloading"] = offloading
    return swap_block_class(model, OffloadedBlock)
