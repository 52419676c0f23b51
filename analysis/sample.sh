#!/bin/bash
# Makes analysis/sample anew: a small real sweep whose rows hold every status, for the notebooks and as an
# example of the record. About ten minutes on two cores. Needs the packages that
# `python slurm/local_cluster.py install` names: one cell is preempted by a real Slurm.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=.  # tests.faults, on Slurm's nodes too
state=$(mktemp -d)
chmod 755 "$state"
trap '"$python" slurm/local_cluster.py stop --state "$state/cluster"; rm -rf "$state"' EXIT

sample() {  # 3: some cells are not measured, as intended here
    "$python" -m vitsweep -m "$@" sweep.folder=analysis sweep.name=sample \
        'sweep.question="What does each status look like, and what helps a small ViT on two cores?"' || [ $? = 3 ]
}

rm -rf analysis/sample

# Techniques alone and together, each in five blocks with its baseline.
sample batch.images_per_step=64 sweep.cells="[['optimizer=adamw_fused'],['classifier=pooled'],['layout=batch_second'],\
['sharding=fsdp'],['precision=O1'],['memory=recompute_blocks'],['optimizer=adamw_fused','classifier=pooled'],\
['optimizer=adamw_fused','classifier=pooled','layout=batch_second']]"

# More ranks: four share two cores, and say so.
sample batch.images_per_step=64 resources.ranks_per_node=1,2,4 optimizer=adamw_fused measurement.blocks=3 \
    sweep.cells_per_block=1

# Longer videos by several methods.
sample model=video_vit_nano data=synthetic_video batch.resolution_px=32 batch.images_per_step=4 \
    data.num_frames=8,16 sequence_parallel=none,ulysses,ring,dsp measurement.blocks=3

# Trained to an accuracy.
sample task=train optimizer=adamw_fused optimizer.learning_rate=0.003 batch.images_per_step=32 \
    measurement=smoke sweep.baseline=null

# What can go wrong: a bug, a signal, a hang, too little memory, a wrong technique, an overflow, a rule.
sample measurement=smoke sweep.baseline=null sweep.cells="[\
['sequence_parallel._target_=tests.faults.Raise','+sequence_parallel.rank=1'],\
['sequence_parallel._target_=tests.faults.Kill','+sequence_parallel.rank=1'],\
['sequence_parallel._target_=tests.faults.Hang','+sequence_parallel.rank=1','measurement.timeout_min=0.3'],\
['resources.memory_gib_per_rank=0.05','data=synthetic','data.native_resolution_px=256'],\
['memory._target_=tests.faults.Scaled','measurement.prove=twin'],\
['memory._target_=tests.faults.Exploding'],\
['sharding=hsdp']]"

# Preempted by a job of a higher partition, and given up before it came to run again.
"$python" slurm/local_cluster.py start --nodes 1 --state "$state/cluster"
eval "$("$python" slurm/local_cluster.py env --state "$state/cluster")"
sample sequence_parallel._target_=tests.faults.Hang +sequence_parallel.rank=0 measurement=smoke sweep.baseline=null \
    hydra/launcher=slurm_local_cluster hydra.launcher.partition=scavenge hydra.launcher.wait=false
until squeue --noheader --states=RUNNING | grep -q .; do sleep 1; done
sleep 30  # its ranks are at work
sbatch --partition=high --exclusive --output=/dev/null --wrap "sleep 60"
until grep -qs '"status": "preempted"' analysis/sample/cells/*/runs/*.json; do sleep 1; done
"$python" -m vitsweep cancel analysis/sample
"$python" -m vitsweep collect analysis/sample

# The records stay; logs and the Slurm job's files name places of this machine, and the report can be made anew.
rm -rf analysis/sample/cells/*/attempts analysis/sample/jobs analysis/sample/report analysis/sample/.lock
