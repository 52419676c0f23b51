"""The thin Hydra face of `vitsweep.launchers`; all Hydra applications import it, so it stays light."""
