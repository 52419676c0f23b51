"""What is known about submitted jobs: their files, Slurm's answers, and records for jobs that died."""
