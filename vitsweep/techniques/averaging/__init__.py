"""A second copy of the weights for evaluation: one technique per file."""
