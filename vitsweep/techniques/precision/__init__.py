"""Precisions: number formats of compute, parameters, gradients and optimizer state."""
