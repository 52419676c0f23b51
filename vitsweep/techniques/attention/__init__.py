"""Implementations of attention: one technique per file."""
