"""The `attend` seam with a kernel asked for by name (needs torch; imported when applied)."""

from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitsweep.model.attention import Attend, attend

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attend_by(backend: str) -> Attend:
    """Return an `attend` that fails where `backend` cannot run, instead of taking another."""
    return partial(_attend, BACKENDS[backend])


def _attend(backend: SDPBackend, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    # The backward pass needs no context: autograd keeps the kernel that the forward pass took.
    with sdpa_kernel(backend):
        return attend(q_BHTK, k_BHTK, v_BHTK)
