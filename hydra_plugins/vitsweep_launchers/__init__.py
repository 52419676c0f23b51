"""The thin Hydra face of `vitsweep.sweep`; all Hydra applications import it, so it stays light."""
