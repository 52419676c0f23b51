"""Collectives that autograd can go through, and what they are booked as."""
