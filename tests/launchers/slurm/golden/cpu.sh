#!/bin/bash

# Parameters
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=4
#SBATCH --exclusive
#SBATCH --job-name=vitsweep-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=40
#SBATCH --wckey=submitit

# setup
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --cpus-per-task=4 --cpu-bind=none --kill-on-bad-exit=0 PYTHON -u -P -m vitsweep.launchers.slurm.node.agent FOLDER DIGEST
