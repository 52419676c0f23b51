"""vitsweep: sweeps over the techniques that make Vision-Transformer training fast, measured soundly."""

__version__ = "0.1.0"
