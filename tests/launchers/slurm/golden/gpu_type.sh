#!/bin/bash

# Parameters
#SBATCH --account=vision
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:8
#SBATCH --job-name=vitsweep-sweep
#SBATCH --mem=256512MB
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=120
#SBATCH --wckey=submitit

# setup
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --cpus-per-task=64 --cpu-bind=none --kill-on-bad-exit=0 PYTHON -u -P -m vitsweep.launchers.slurm.node.agent FOLDER DIGEST last '/my code'
