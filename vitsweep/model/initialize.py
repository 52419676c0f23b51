"""First weights of a model, each fixed by torch's seed and its own name.

A weight is drawn whole, in float32 on the device that keeps it, by a generator of its own. So it is the
same on every number of ranks and under every technique (a CPU and a GPU draw different numbers, and so may
two types of GPU), and a rank draws only what it holds some part of: a model that is built on `meta`,
split over ranks and sharded is materialised one tensor at a time. A GPU draws ten billion numbers within
a second, for which a host needs minutes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitsweep.collectives.parallel_linear import SplitLinear
from vitsweep.spec.generators import named_seed, seeded_generators

# Names of parameters as the reference model has them.


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
    """Return the reference model's name of the parameter that a wrapped model calls `name`."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for other, plain in PLAIN.items():
        name = name.replace(other, plain)
    return name


LEARNED_TOKENS = ("embedding.class_token", "embedding.registers")


def draw_transformer_weight(
    name: str, weight: Tensor, generator: torch.Generator, *, layer_scale: float
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
        name: in the reference model.
        weight: whole, float32.
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
    elif name.endswith("bias"):
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
    # a module of the user's is on `meta` only where nothing reads its weights
    if hasattr(model, "draw"):
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
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        model.draw(plain, whole, named_generator(seed, plain, whole.device))
        _fill(parameter, module.part_of(own, whole) if split else whole)


@torch.no_grad()
def draw_zeros(model: nn.Module, seed: int) -> nn.Module:
    """Draw trained tensors with two axes or more that are all zero: no gradient passes them.

    Args:
        model: whole, on the host, before anything wraps it.
        seed: with the name of a tensor it fixes the numbers, which are normal with standard deviation 0.02.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim > 1 and not parameter.any():
            generator = named_generator(seed, name)
            drawn = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.copy_(0.02 * drawn)
    return model


def named_generator(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator whose numbers follow from a seed and a name."""
    return torch.Generator(device).manual_seed(named_seed(seed, name))


def _fill(parameter: Any, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # Every rank has the same values: nothing is sent.
        shard = distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(value)


# Random choices of a forward pass that are the same whenever it is repeated (needs torch).


class Draws:
    """Gives each forward pass of a replica's training random numbers of its own.

    They follow from the seed, the replica, the optimizer step and the number of the forward pass in
    it, and from nothing else: the ranks that share an image and the stages of a pipeline draw alike,
    and a training that is resumed draws what the uninterrupted one would.

    Attributes:
        seed: of the cell.
        replica: which share of the images this rank sees.
        step: optimizer step.
    """

    def __init__(self, seed: int, replica: int = 0) -> None:
        self.seed, self.replica, self.step = seed, replica, 0
        self._begun = 0

    def begin(self, step: int) -> None:
        """Let the next forward pass be the first one of an optimizer step."""
        self.step = step
        self._begun += 1

    def uniform(
        self, owner: nn.Module, purpose: str, size: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Return float32 numbers of [0, 1) on the device of `like`, the next ones of `owner`.

        Args:
            owner: whose forward passes are counted: a model, or a stage of one. One without
                gradients (it looks for shapes) does not count.
            purpose: of the numbers; each has its own.
            size: of what is returned.
            like: a tensor on the device.
        """
        begun, number = vars(owner).get(f"drawn_{purpose}", (self._begun, 0))
        if begun != self._begun:
            number = 0
        if torch.is_grad_enabled():
            vars(owner)[f"drawn_{purpose}"] = (self._begun, number + 1)
        name = f"{purpose} {self.replica} {self.step} {number}"
        generator = named_generator(self.seed, name, like.device)
        return torch.rand(size, generator=generator, device=like.device, dtype=torch.float32)

    def default_generators(self, device: torch.device) -> AbstractContextManager[None]:
        """Give code that is not ours, such as `nn.Dropout`, the numbers of this replica and step.

        Inside the generators of `spec.generators` follow from what all draws follow from; afterwards
        they are as before.
        """
        return seeded_generators(self.seed, f"default {self.replica} {self.step}", device)


def chosen(numbers: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` smallest numbers along the last axis, ascending."""
    return numbers.argsort(-1)[..., :count].sort(-1).values


# Random subsets of the patches of each image (needs torch).


def drop_after_embedding(
    model: nn.Module, kept: Callable[[int], int], *, image_by_image: bool = False
) -> nn.Module:
    """Let the embedding of a model return a share of the patches in training.

    Args:
        model: with `embedding`, `draws`, and `spec`.
        kept: patches of an image -> how many of them stay.
        image_by_image: pick them by a slow loop.
    """
    vit: Any = model
    pick = _picked_one_by_one if image_by_image else picked_rows

    def drop(embedding: Any, inputs: object, tokens: Tensor) -> Tensor:
        if not embedding.training:
            return tokens
        x_BTD = tokens if vit.batch_first else tokens.transpose(0, 1)
        images, length, _ = x_BTD.shape
        first = embedding.num_prefix_tokens
        patches = length - first
        draws: Draws = vit.draws
        numbers = draws.uniform(embedding, "drop_tokens", (images, patches), tokens)
        places_BK = chosen(numbers, kept(patches)) + first
        prefix = torch.arange(first, device=tokens.device).expand(images, -1)
        kept_BKD = pick(x_BTD, torch.cat([prefix, places_BK], dim=1))
        return kept_BKD if vit.batch_first else kept_BKD.transpose(0, 1).contiguous()

    # A hook, because no name of a parameter may change. It runs before those that deal out tokens.
    vit.embedding.register_forward_hook(drop)
    return model


def picked_rows(x_BTD: Tensor, places_BK: Tensor) -> Tensor:
    """Return tokens (B, K, D) of those (B, T, D), at the places of each image."""
    images, length, _ = x_BTD.shape
    starts = torch.arange(images, device=x_BTD.device).unsqueeze(1) * length
    rows = (places_BK + starts).flatten()
    # Whole rows: `gather` would need an index for each number, and scatter gradients one by one.
    return x_BTD.flatten(0, 1).index_select(0, rows).unflatten(0, places_BK.shape)


def _picked_one_by_one(x_BTD: Tensor, places_BK: Tensor) -> Tensor:
    return torch.stack([x_BTD[image][places] for image, places in enumerate(places_BK)])
