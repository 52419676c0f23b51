#!/bin/sh
# Which versions of torch vitsweep runs with: for each an environment of its own, removed afterwards (5 to 8 GB), in which run
# the equivalence tests, a sweep with its proofs, `plan` of every named sweep without predictions, which take minutes each, and
# one `plan` with them. A quarter of an hour for each version. Prints rows for docs/torch_versions.md.
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
plans() { # all but sweeps of images of one's own, which need a folder
    (cd "$root/conf/sweep" && ls) | sed 's/.yaml$//' | xargs -n 1 -P 2 sh -c '
        "$0" -m vitsweep plan --no-predict "+sweep=$1" > "$1.txt" 2>&1 || {
            code=$?
            [ $code = 2 ] && grep -q "needs .data.folder=PATH" "$1.txt" || { echo "$1: exit $code"; cat "$1.txt"; exit 1; }
        }' "$env/bin/python"
}
predicts() { # a step time for every cell: what cannot be predicted is no error of `plan`
    "$env/bin/python" -m vitsweep plan -m precision=O1,O2 sharding=ddp,fsdp --json > plan.txt &&
        "$env/bin/python" -c 'import json, sys; sys.exit(not all([c.get("step_time_ms") for c in json.load(sys.stdin)["cells"]]))' < plan.txt
}

echo '| torch | Python | torchao | equivalence tests | `precision=O1,O2 sharding=ddp,fsdp` | `plan` of the named sweeps | predictions |'
echo '|---|---|---|---|---|---|---|'
for version in "$@"; do
    env=$home/$version
    [ -e "$env" ] || "$python" -m venv "$env"
    case $version in 2.9.*) torchao='torchao<0.18' ;; *) torchao=torchao ;; esac
    if ! (install --upgrade pip && install "torch==$version" && install "$torchao" --group "$root/pyproject.toml:test" "$root") > "$home/$version-install.log" 2>&1; then
        echo "| $version | not to be had: $(tail -n 1 "$home/$version-install.log") |"
        continue
    fi
    work=$(mktemp -d "$home/work.XXXX")
    cd "$work" || exit 1
    found=$("$env/bin/python" -c 'import sys; from importlib.metadata import version as v; print(v("torch"), "|", sys.version.split()[0], "|", v("torchao"))')
    equal=$(cd "$root" && said equivalence "$env/bin/python" -m pytest -q -p no:cacheprovider -m 'not full' tests/test_equivalence.py tests/training/test_local_shards.py)
    sweep=$(said sweep "$env/bin/python" -m vitsweep -m precision=O1,O2 sharding=ddp,fsdp measurement=smoke measurement.prove=twin sweep.folder="$work/sweep")
    planned=$(said plans plans)
    predicted=$(said predictions predicts)
    echo "| $found | $equal | $sweep | $planned | $predicted |"
    cd "$home" && rm -rf "$work"
    [ -n "${KEEP:-}" ] || rm -rf "$env"
done
