"""The plain single-device Vision Transformer: it knows nothing of techniques."""
