"""Names of parameters as the plain model has them."""

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
