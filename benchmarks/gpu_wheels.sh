#!/bin/sh
# What vitsweep needs beside torch, timm, torchvision, transformers, pandas, pyarrow, rich, scipy and matplotlib, unpacked into
# a folder for PYTHONPATH, for a machine that can install nothing.
#
#     benchmarks/gpu_wheels.sh FOLDER [PYTHON_VERSION]     # 3.12 unless given; needs pip and a package index
#     PYTHONPATH=CHECKOUT:FOLDER python benchmarks/gpu.py --out RESULTS
set -eu
folder=$1
version=${2:-3.12}
here=$(dirname "$0")
python=${PYTHON:-python3}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

# antlr4's runtime has no wheel on the index: it is built here, for any Python.
antlr4=$(grep '^antlr4-python3-runtime==' "$here/../constraints.txt")
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$antlr4"

pinned() { grep -E "^($1)==" "$here/../constraints.txt"; }
# pydantic_core is compiled: the wheel must fit that machine's Python, not this one's.
pinned 'hydra-core|omegaconf|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions|psutil|nvidia-ml-py|PyYAML|packaging|torchao' |
    xargs "$python" -m pip install --quiet --no-deps --only-binary=:all: --python-version "$version" \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
        --target "$folder" --upgrade
"$python" -m pip install --quiet --no-deps --target "$folder" --upgrade "$wheels"/antlr4*.whl
echo "PYTHONPATH=CHECKOUT:$folder python benchmarks/gpu.py --out RESULTS"
