"""Sharding: who holds parameters, gradients and optimizer state among data-parallel ranks."""
