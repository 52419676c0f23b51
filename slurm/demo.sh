#!/bin/bash
# A small sweep on a real Slurm of four nodes on this machine: submit, return, watch, report.
# `make slurm-demo`; needs the packages that `python slurm/local_cluster.py install` names.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
sweep=${SWEEP:-slurm_demo}
folder=$(mktemp -d)
chmod 755 "$folder"
trap '"$python" slurm/local_cluster.py stop --state "$folder/cluster"; rm -rf "$folder"' EXIT

"$python" slurm/local_cluster.py start --nodes 4 --state "$folder/cluster"
eval "$("$python" slurm/local_cluster.py env --state "$folder/cluster")"
sinfo

"$python" -m vitsweep -m precision=O1,O2 sharding=ddp,fsdp resources.nodes=1,2 \
    measurement=smoke resources.ranks_per_node=1 hydra/launcher=slurm_local_cluster \
    hydra.launcher.wait=false sweep.name="$sweep"
squeue
"$python" -m vitsweep status "$sweep" --watch
sacct -X --format=JobID,JobName%24,NNodes,NodeList%20,State,Elapsed || true
"$python" -m vitsweep collect "$sweep"
"$python" -m vitsweep report "$sweep"
