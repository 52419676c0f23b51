"""Sequence parallelism."""
