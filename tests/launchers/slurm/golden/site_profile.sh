#!/bin/bash

# Parameters
#SBATCH --account=my-project
#SBATCH --array=0-2%3
#SBATCH --comment='it'"'"'s "quoted"; $HOME'
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=vitsweep-sweep
#SBATCH --mail-type=END
#SBATCH --mem=256512MB
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --reservation=friday
#SBATCH --signal=USR2@60
#SBATCH --time=120
#SBATCH --wckey=submitit

# setup
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
module load cuda/12.8
export NCCL_SOCKET_IFNAME=ib0

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --cpus-per-task=64 --cpu-bind=none --kill-on-bad-exit=0 '--container-image=/images/vit sweep.sqsh' apptainer exec --nv /images/vitsweep.sif python -u -P -m vitsweep.launchers.slurm.node.agent FOLDER DIGEST first /code
