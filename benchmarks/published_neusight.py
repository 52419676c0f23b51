"""NeuSight's measured training passes (ASPLOS'25) beside predictions.

Measured were forward and backward passes of transformers' BERT, GPT-2 and OPT in float32 without
TensorFloat-32, with attention in plain operators and a loss over all tokens, on one GPU
(neusight/Tracing/trace.py, `measure_e2e`); no optimizer. Its caches are emptied before every pass, so that
allocations are part of the times. Left out: Switch transformers (experts), the four-GPU rows (Megatron's
settings are not in the file), passes for inference, and devices without a profile (L4, T4, P4, P100) or
with one of another board (V100 PCIe, AMD).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.closed_trace import closed_trace
from benchmarks.published_rows import Row, gpt, mesh_of, names_of, text_of, with_figure
from vitsweep.extras.predict.profile_rates import TableRates
from vitsweep.extras.predict.step_time import predict_step
from vitsweep.planning.closed_memory import Sizes
from vitsweep.rates.profile import Profile, profile_named

LABELS, CONFIGS = "scripts/asplos/label", "scripts/asplos/data/DLmodel_configs"


def _devices() -> dict[str, tuple[str, Profile]]:
    """Folder of labels -> regime and profile."""
    a100 = profile_named("a100_80g")
    return {
        "NVIDIA_H100_80GB_HBM3": ("H100", profile_named("h100")),
        "NVIDIA_A100_80GB_PCIe": (
            "A100 PCIe",
            with_figure(a100, "memory_tb_s", 1.935, "NVIDIA A100 80GB PCIe datasheet"),
        ),
    }


def neusight(folder: Path) -> Iterator[Row]:
    """One GPU, float32, batch 1 to 8, 512 to 2,048 tokens."""
    clone = folder / "NeuSight"
    for device, (chip, hardware) in _devices().items():
        for path in names_of(clone, f"{LABELS}/{device}"):
            name = re.fullmatch(r"(bert|gpt|opt)(\w*)-train-(\d+)-(\d+)\.json", path.split("/")[-1])
            if not name:
                continue
            family, tokens, batch = name[1], int(name[3]), int(name[4])
            model = f"{family}{name[2]}"
            config = json.loads(text_of(clone, f"{CONFIGS}/{model}.json"))
            shape = gpt(*_shape(config), tokens, config["vocab_size"], fused=False)
            one = {"mesh": mesh_of(), "ranks_per_node": 1, "micro_batch": batch}
            trace = closed_trace(Sizes(**shape, **one, compute="float32", inner=4))
            passes = replace(
                trace,
                operators=tuple(o for o in trace.operators if o.phase != "optimizer"),
                dispatches=trace.dispatches | {"optimizer": 0},
            )
            yield Row(
                regime=f"{chip}, float32, forward and backward, 1 GPU",
                group=f"{model} on {chip}",
                label=f"{model} s{tokens} batch {batch} on {chip}",
                measured_ms=json.loads(text_of(clone, path))["e2e_latency"],
                prediction=predict_step(passes, TableRates(hardware)),
            )


def _shape(config: dict[str, Any]) -> tuple[int, int, int]:
    """Depth, width and heads; every MLP is four times as wide."""
    if "n_layer" in config:
        return config["n_layer"], config["n_embd"], config["n_head"]
    return config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
