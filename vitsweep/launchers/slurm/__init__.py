"""Sweeps on Slurm: `submit` makes job arrays, `node` runs inside jobs, `state` reads what became of them."""
