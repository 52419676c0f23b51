"""One optimizer step, and training to an accuracy."""
