"""A small conf/ with everything that makes a piece *not* local."""

from pathlib import Path

from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer

FILES = {
    "config.yaml": """
        defaults:
          - model: small
          - precision: plain
          - data: images
          - head: one
          - nested/kind: a
          - _self_
        seed: 0
        list: [1, 2]
        nothing: null
        precision: {}
        data: {from_primary: 1}
        sweep:
          {name: default, folder: results, question: "", baseline: default, match: [model],
           zip: [], axes: {}, cells: [], by_machine: {}, published: [], reference: null, cells_per_block: 8,
           retry: [], remeasure: false,
           replicate: null, accept_code: same, search: grid, rank_by: throughput, keep_model: false,
           memory_limit_gib: null, indifference: 0.02, minutes: null,
           screening: auto, prune_slowdown: 4, confirm: 5, only: null, max_gpu_hours: null,
           try_anyway: false, report: true,
           limit: {key: null, first: 16, step: 1, most: null, within: 0.06},
           snapshot_code: false}
        """,
    "model/small.yaml": "width: 8\ndepth: 2\ninner: {a: 1, b: [1, 2]}\n",
    "model/large.yaml": "width: 16\ndepth: 4\ninner: {a: 2, b: []}\n",
    "model/follows.yaml": "width: ${seed}\ndepth: 1\ninner: {a: 3, b: []}\n",
    "model/based.yaml": "defaults:\n  - small\n  - _self_\nwidth: 99\n",
    "model/everywhere.yaml": "# @package _global_\nseed: 7\nmodel: {width: 1}\n",
    "model/void.yaml": "# nothing in it\n",
    "precision/plain.yaml": "bits: 32\n",
    "precision/half.yaml": "bits: 16\nscale: dynamic\n",
    "data/images.yaml": "count: 10\n",
    "data/fields.yaml": "count: 20\n",
    "head/one.yaml": "# @package model\nclasses: 10\n",
    "head/two.yaml": "# @package model\nclasses: 20\n",
    "nested/kind/a.yaml": "x: 1\n",
    "nested/kind/b.yaml": "x: 2\n",
    "experiment/wide.yaml": """
        # @package _global_
        defaults:
          - override /precision: half
        model: {width: 64}
        """,
    "sweep/ladder.yaml": """
        name: ladder
        axes: {seed: "range(0,2)", model: [small, large]}
        cells:
          - precision=half
          - [precision=half, precision.scale=static]
        """,
}


def write(folder: Path) -> Path:
    from textwrap import dedent

    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder


def composer(folder: Path) -> Composer:
    return Composer(hydra.open_loader(write(folder)))
