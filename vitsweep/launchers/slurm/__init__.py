"""Sweeps on Slurm: `submit` sends job arrays, `node` runs inside jobs, `state` reads how jobs are doing."""
