"""Sweep our own model, data, technique and metric: `python run.py` in this folder."""

import sys
from pathlib import Path

import vitsweep

HERE = Path(__file__).parent

sweep = vitsweep.sweep(
    ["metric=cost", *sys.argv[1:]],
    model="own",
    data="stripes",
    sharding=["ddp", "fsdp"],
    precision="O1",
    memory=["keep_all", "recompute_first"],
    batch={"images_per_step": 16},
    name="own_model",
    config_dir=HERE / "conf",
)
print(sweep.speedups().to_string())
print(sweep.cells[["sharding", "memory", "proved", "usd_per_million_images"]].to_string())
print(sweep.report())
