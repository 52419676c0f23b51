"""Accuracy over the time and the epochs of trainings."""
