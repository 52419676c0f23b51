"""The single-device reference model, a Vision Transformer: it knows nothing of techniques."""
