#!/bin/sh
# Rehearses training steps on fake CUDA tensors, in an environment of its own (5 GB, made once).
#
#     benchmarks/rehearsal/run.sh [product] [choices ...] [--ranks 1 2 8 512]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
home=${REHEARSAL:-$root/.rehearsal}
python=${PYTHON:-python3}

if [ ! -e "$home/installed" ]; then
    "$python" -m venv "$home/venv"
    # The index's own build, which is for CUDA, and no wheel for CPUs that pip may be configured to prefer.
    env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
        "$home/venv/bin/pip" install --quiet torch==2.11.0 numpy pandas pyarrow rich scipy matplotlib
    version=$("$home/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    PYTHON=$home/venv/bin/python "$root/benchmarks/gpu_wheels.sh" "$home/packages" "$version"
    touch "$home/installed"
fi
# autograd asks the runtime for devices and the driver for the context: one stub for each
cc -shared -fPIC -w -o "$home/libstub.so" "$here/cudart_stub.c"
cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$home/libcuda.so.1" "$here/cuda_stub.c"
LD_LIBRARY_PATH=$home LD_PRELOAD=$home/libstub.so PYTHONPATH=$root:$home/packages \
    exec "$home/venv/bin/python" "$here/rehearse.py" "$@"
