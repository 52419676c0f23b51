"""What this machine can do for sweeps, and what is missing."""
