"""Who runs which blocks where: this machine, processes that torchrun or srun started, or Slurm."""
