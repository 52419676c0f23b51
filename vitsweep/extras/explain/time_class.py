"""Names of what a traced step spends its time on (no torch)."""

from enum import StrEnum

POOLED, BETWEEN = "(smaller)", "(between operators)"
"""What a trace calls the small operators of a class together, and the time between operators."""


class TimeClass(StrEnum):
    """What the time of a traced step is spent on; each instant belongs to one class."""

    products = "matrix products"
    attention = "attention"
    elementwise = "normalization and element-wise"
    copies = "casts and copies"
    fused = "fused kernels"
    other = "other operators"
    recomputation = "recomputation"
    optimizer = "optimizer"
    communication = "exposed communication"
    ranks = "waiting for ranks"
    data = "waiting for data"
    host = "launch gaps (host)"
