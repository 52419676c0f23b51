"""Which parameters decay."""

from typing import Any

from torch import nn

from vitsweep.collectives.parallel_linear import split_over_ranks
from vitsweep.model.initialize import plain_name


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters in two groups: matrices with weight decay, everything else without.

    Norms, biases, position embeddings and class tokens do not decay (timm does the same for norms
    and biases; DeiT, arXiv:2012.12877, for embeddings and tokens too). pycls decays all of
    them, unless `USE_CUSTOM_WEIGHT_DECAY` of its `BN`, `LN` or `BIAS` is set. A matrix is what has
    at least two axes and a name that ends in `weight`. Works on wrapped and sharded models.

    Each group holds the plain model's `names` of its parameters. Parts of matrices that are split
    over tensor ranks form groups of their own, marked by `split_over_tensor`: a norm over all
    parameters adds them up over these ranks.
    """
    split = split_over_ranks(model)
    found: dict[tuple[bool, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and name.endswith("weight")
            found.setdefault((name in split, decays), {})[plain_name(name)] = parameter
    order = ((False, True), (False, False), (True, True), (True, False))
    return [
        {"params": list(found[key].values()), "names": list(found[key])}
        | {"weight_decay": weight_decay if key[1] else 0.0}
        | ({"split_over_tensor": True} if key[0] else {})
        for key in order
        if key in found  # a pipeline stage may lack one
    ]
