"""Collectives that autograd can go through, and the purpose their bytes are counted under."""
