"""Techniques outside of vitsweep: docs/extend/technique.md explains them."""
