"""A module of a user's that writes down which variables it found when it was imported."""

import os

from torch import nn

FOUND = [os.environ.get(name, "unset") for name in ("NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS")]


def build(seen_in: str) -> nn.Module:
    """Return images (B, 1, 8, 8) -> logits (B, 10)."""
    with open(seen_in, "a", encoding="utf-8") as file:
        file.write(" ".join(FOUND) + "\n")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
