"""Gives the cells of a sweep folder the ids that this version gives them, and writes which became which.

A cell's id is a hash of its spec: it changes where a part of the spec is added or renamed. Measurements stay
as they are. From the frozen `cell.yaml` of each cell this script takes the choices and values, takes the
class of each choice from `conf/`, and adds what cells did before a part was added (`BEFORE`).

    python -m analysis.rekey analysis/sample ids.json
    python -m vitsweep collect analysis/sample        # makes the tables anew
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from vitsweep.results.record import SCHEMA_VERSION
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import GROUPS, flatten
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import conf_dir, plain_choice

Tree = dict[str, Any]

BEFORE: dict[str, Tree] = {
    "model": {"mlp": "gelu", "layer_scale": None, "registers": 0, "position": "learned"},
    "task": {
        "evaluate_every_epochs": 1, "target_accuracy": None, "checkpoint_minutes": 10.0, "resume_from": None,
    },
    "measurement": {"warmup_min_seconds": 0.0, "min_seconds": 0.0, "max_seconds": 31_536_000.0},
    "layout": {"patch_embedding": "convolution", "cudnn_benchmark": False},
    "attention": {"flash_kernel": "torch"},
    "precision": {"layers": "all"},
    "sharding": {
        "gradient_dtype": None, "blocks_per_unit": 1, "prefetch_forward": 0, "prefetch_backward": 0,
        "whole_norms": False, "symmetric_memory": False,
    },
    "compilation": {"mode": "default", "optimizer_step": False},
    "memory": {"keep": ["linear", "attention"]},
    "recipe": {"name": "none"},
}  # fmt: skip
"""Group -> what its cells did before a key of it was added; before a technique's group, its plain choice."""


def rekey(store: Store) -> dict[str, str]:
    """Rename the cells of a folder; return old id -> new id."""
    ids = {}
    for old in store.cell_ids():
        document, folder = store.frozen(old), store.cell(old)
        tree = document["cell"]
        for group in {**tree, **BEFORE, **GROUPS}:
            if (conf_dir() / group).is_dir() and group not in ("resources", "mesh"):
                tree[group] = of_today(group, tree.get(group, {}))
        cell = cell_from_tree(tree)
        ids[old] = document["cell_id"] = cell.cell_id
        (folder / "cell.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        for path in [*folder.glob("runs/*.json"), folder / "record.json"]:
            if path.exists():
                write(path, cell.cell_id, flatten(cell))
        folder.rename(store.cell(cell.cell_id))
    if len(set(ids.values())) < len(ids):
        raise SystemExit("Two cells became one.")
    commands = store.root / "commands.jsonl"
    text = commands.read_text()
    for old, new in ids.items():
        text = text.replace(old, new)
    commands.write_text(text)
    return ids


def of_today(group: str, node: Tree) -> Tree:
    """Return one group of a cell with its class of today and every key that the class has."""
    before = BEFORE.get(group, {})
    name = node.get("name") or before.get("name") or plain_choice(group)
    choice = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    added = {key: value for key, value in before.items() if key in choice}
    found: Tree = {**(added if node else {**choice, **added}), **node, "name": name}
    if "_target_" in choice and not str(node.get("_target_")).startswith("tests."):
        found["_target_"] = choice["_target_"]
    return found


def write(path: Path, cell_id: str, spec: Tree) -> None:
    """Write a record anew with an id, a spec and the schema of today; its numbers stay."""
    record = json.loads(path.read_text())
    if different := {k for k, v in record.get("spec", {}).items() if spec[k] != v}:
        raise SystemExit(f"{path}: {sorted(different)} would change.")
    record |= {"cell_id": cell_id, "schema_version": SCHEMA_VERSION}
    path.write_text(json.dumps(record | ({"spec": spec} if "spec" in record else {}), indent=1))


if __name__ == "__main__":
    folder, map_file = map(Path, sys.argv[1:])
    map_file.write_text(json.dumps(rekey(Store(folder)), indent=1) + "\n")
