"""What belongs to the user comes back as it was: generators, flags, modes, buffers (needs torch)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitsweep.spec.generators import kept_generators
from vitsweep.world import process_flags_kept


@contextmanager
def as_it_was(module: nn.Module | None = None) -> Iterator[None]:
    """Context after which a module, the default generators and torch's flags are as before.

    Of the module these are the mode of each part (`training`), which parameters need gradients, and the
    buffers. What it keeps elsewhere, as in an attribute that its forward pass counts up, stays as it is then.

    Args:
        module: which the body may switch to evaluation by `eval()`, and call.
    """
    on_gpu = torch.cuda.is_initialized()  # one that nobody has used yet is left alone
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    with process_flags_kept(), kept_generators(device):
        if module is None:
            yield
            return
        mode, modes = module.training, [(part, part.training) for part in module.modules()]
        trained = [(p, p.requires_grad) for p in module.parameters()]
        held = [(part, dict(part._buffers)) for part, _ in modes if part._buffers]
        written = [b for _, own in held for b in own.values() if b is not None and is_writable(b)]
        copies = [buffer.detach().clone() for buffer in written]
        try:
            yield
        finally:
            module.train(mode)  # a `train` of the user's may undo what its `eval` did
            for part, was in modes:
                part.training = was
            for parameter, was in trained:
                if parameter.requires_grad != was:
                    parameter.requires_grad_(was)
            for part, own in held:
                part._buffers.clear()
                part._buffers.update(own)
            with torch.no_grad():
                for buffer, copy in zip(written, copies, strict=True):
                    buffer.copy_(copy)


def is_writable(buffer: Tensor) -> bool:
    """Whether a buffer can be written in place: one that was expanded cannot."""
    places = zip(buffer.stride(), buffer.shape, strict=True)
    return all(step or length <= 1 for step, length in places)


def set_to_train(module: nn.Module) -> None:
    """Call `train()` of a new module; parts that its constructor left in evaluation mode stay in it.

    A module that is in evaluation mode as a whole, as `from_pretrained` returns it, is trained as a whole.
    """
    frozen = [part for part in module.modules() if not part.training]
    is_whole = len(frozen) == len([*module.modules()])
    module.train()
    for part in [] if is_whole else frozen:
        part.training = False
