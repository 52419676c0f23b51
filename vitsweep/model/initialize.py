"""First weights of a model, each fixed by torch's seed and its own name.

A weight is drawn whole, in float32 on the CPU, by a generator of its own. So it is the same on every
device and under every technique, and a rank draws only what it holds some part of: a model that is
built on `meta`, split over ranks and sharded is materialised one tensor at a time.
"""

import hashlib
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitsweep.collectives.parallel_linear import SplitLinear

# Names of parameters as the plain model has them.


WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""What DistributedDataParallel, torch.compile and torch's checkpoint wrapper put into a name."""

PLAIN = {
    "attention.in_proj_weight": "attention.qkv.weight",
    "attention.in_proj_bias": "attention.qkv.bias",
    "attention.out_proj.weight": "attention.out.weight",
    "attention.out_proj.bias": "attention.out.bias",
}
"""`nn.MultiheadAttention` has the same tensors as our attention, in the same layout."""


def plain_name(name: str) -> str:
    """Return the plain model's name of the parameter that a wrapped model calls `name`."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for other, plain in PLAIN.items():
        name = name.replace(other, plain)
    return name


LEARNED_TOKENS = ("embedding.class_token", "embedding.registers")


def draw_transformer_weight(
    name: str, weight: Tensor, generator: torch.Generator, *, layer_scale: float = 1.0
) -> None:
    """Draw one weight of a transformer in place.

    As the original JAX code (google-research/vision_transformer): linears of the blocks uniform
    after Glorot, q, k and v each for itself; positions normal with standard deviation 0.02; biases
    zero, norms one and zero. Patch filters are truncated normal with variance 1 / fan-in, as in
    pycls (`init_weights_vit`) and timm.

    pycls differs in the rest: q, k and v are one matrix (3 D, D) to Glorot's rule in its
    nn.MultiheadAttention, which makes them smaller (standard deviation 0.036 instead of 0.051 at
    D = 384); the output projection has torch's default; biases of the MLP are normal with 1e-6; the
    class token is zero, here normal with 0.02.

    The head differs from both: they start it at zero, where no gradient reaches the body in the
    first step. It is truncated normal with 0.02 here, so that a wrong gradient shows in the first
    step; the first loss still lies near log(num_classes).

    Args:
        name: in the plain model.
        weight: whole, float32, on the CPU.
        generator: for the random numbers.
        layer_scale: first value of LayerScale's factors.

    Raises:
        ValueError: there is no rule for this name.
    """
    if name.endswith("attention.qkv.weight"):
        for part in weight.chunk(3):
            nn.init.xavier_uniform_(part, generator=generator)
    elif name.endswith(("attention.out.weight", "mlp.up.weight", "mlp.down.weight")):
        nn.init.xavier_uniform_(weight, generator=generator)
    elif name == "embedding.patch.weight":
        nn.init.trunc_normal_(weight, std=sqrt(1 / weight[0].numel()), generator=generator)
    elif name.startswith("embedding.position") or name in LEARNED_TOKENS:
        nn.init.normal_(weight, std=0.02, generator=generator)
    elif name.endswith((".scale_attention", ".scale_mlp")):
        nn.init.constant_(weight, layer_scale)
    elif name == "head.weight":
        nn.init.trunc_normal_(weight, std=0.02, generator=generator)
    else:
        draw_norm_or_bias(name, weight)


def draw_norm_or_bias(name: str, weight: Tensor) -> None:
    """Set the weight of a norm to one, any bias to zero.

    Raises:
        ValueError: it is neither.
    """
    if name.endswith("bias"):
        nn.init.zeros_(weight)
    elif weight.ndim == 1 and ".norm" in f".{name}":
        nn.init.ones_(weight)
    else:
        raise ValueError(f"There is no rule for the first values of `{name}`.")


def materialize(model: Any, device: torch.device) -> None:
    """Allocate a model that was built on `meta`, or a stage or shards of it, and draw its weights.

    A model that is not on `meta` has its weights and is moved.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
        return
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    if hasattr(
        model, "draw"
    ):  # a module of the user's is on `meta` only where nothing reads its weights
        draw_weights(model)


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Draw all weights of a model, or those parts of them that this rank holds.

    `model.draw(name, weight, generator)` says how.
    """
    seed, modules = torch.initial_seed(), dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        module, plain = modules[owner], plain_name(name)
        split = isinstance(module, SplitLinear)
        shape = module.whole_shape(own) if split else parameter.shape
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        model.draw(plain, whole, named_generator(seed, plain))
        _fill(parameter, module.part_of(own, whole) if split else whole)


def named_generator(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator whose numbers follow from a seed and a name."""
    return torch.Generator(device).manual_seed(named_seed(seed, name))


def named_seed(seed: int, name: str) -> int:
    """Return a seed that follows from a seed and a name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


def _fill(parameter: Any, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        value = value.to(mesh.device_type)
        # Every rank has the same values: nothing is sent.
        shard = distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(value)
