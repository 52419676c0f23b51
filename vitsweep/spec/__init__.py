"""What is asked for: frozen dataclasses, no torch, no Hydra objects."""
