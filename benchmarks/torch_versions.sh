#!/bin/sh
# Which versions of torch vitsweep runs with: for each an environment of its own, removed afterwards (5 to 8 GB), in which run
# the equivalence tests, two sweeps with their proofs, and `plan` of every named sweep. Prints rows for docs/torch_versions.md.
#
#     benchmarks/torch_versions.sh FOLDER 2.9.1 2.15.0      # FOLDER keeps the logs; KEEP=1 keeps the environments too
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && home=$(cd "$1" && pwd) && shift
python=${PYTHON:-python3}
grep -vE '^(torch|torchao)==' "$root/constraints.txt" > "$home/constraints.txt"

# What is asked for is what is tried, whatever pip is configured to prefer.
install() { PIP_CONFIG_FILE=/dev/null "$env/bin/python" -m pip install --quiet --no-compile --constraint "$home/constraints.txt" "$@"; }
said() { # NAME COMMAND...: `yes`, or `no` with the log
    name=$1
    shift
    if "$@" > "$home/$version-$name.log" 2>&1; then echo yes; else echo "no ($version-$name.log)"; fi
}
plans() { # one process for all named sweeps: torch is not loaded
    for file in "$root"/conf/sweep/*.yaml; do
        sweep=$(basename "$file" .yaml)
        "$env/bin/python" -m vitsweep plan "+sweep=$sweep" > "$home/plan.txt" 2>&1
        case $? in 0 | 1) ;; *) cat "$home/plan.txt"; echo "$sweep"; failed=1 ;; esac
    done
    [ -z "${failed:-}" ]
}

echo '| torch | Python | torchao | equivalence tests | `precision=O1,O2 sharding=ddp,fsdp` | `plan` of the named sweeps |'
echo '|---|---|---|---|---|---|'
for version in "$@"; do
    env=$home/$version
    [ -e "$env" ] || "$python" -m venv "$env"
    case $version in 2.9.*) torchao='torchao<0.18' ;; *) torchao=torchao ;; esac
    if ! (install --upgrade pip && install "torch==$version" && install "$torchao" --group "$root/pyproject.toml:test" "$root[tensorboard]") > "$home/$version-install.log" 2>&1; then
        echo "| $version | not to be had: $(tail -n 1 "$home/$version-install.log") |"
        continue
    fi
    work=$(mktemp -d "$home/work.XXXX")
    cd "$work" || exit 1
    found=$("$env/bin/python" -c 'import sys; from importlib.metadata import version as v; print(v("torch"), "|", sys.version.split()[0], "|", v("torchao"))')
    equal=$(cd "$root" && said equivalence "$env/bin/python" -m pytest -q -p no:cacheprovider -m 'not full' tests/test_equivalence.py tests/training/test_local_shards.py)
    sweep=$(said sweep "$env/bin/python" -m vitsweep -m precision=O1,O2 sharding=ddp,fsdp measurement=smoke measurement.prove=twin sweep.folder="$work/sweep")
    planned=$(said plans plans)
    echo "| $found | $equal | $sweep | $planned |"
    cd "$home" && rm -rf "$work"
    [ -n "${KEEP:-}" ] || rm -rf "$env"
done
