"""What is known of submitted jobs: their files, Slurm's answers, and records for jobs that died."""
