"""Optimizers: the same update in different implementations."""
