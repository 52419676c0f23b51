"""Predicted against published step times, by regime; run as `python -m benchmarks.published_throughput DIR`.

DIR holds clones of four repositories, whose tables are read and not copied:

- github.com/VIA-Research/vTrain (MIT): 1,549 measured layouts of GPT models on 2 to 512 A100, Megatron-LM,
  tensor, data and pipeline parallel, everything recomputed (data/ground_truth_*.csv)
- github.com/mosaicml/llm-foundry (Apache-2.0): MPT models of 125 M to 70 B parameters under FSDP on 8 to 512
  A100 and H100 (scripts/train/benchmarking/README.md)
- github.com/huggingface/pytorch-image-models (Apache-2.0): ViTs on one RTX 3090 under autocast
  (results/benchmark-train-amp-nchw-*.csv)
- github.com/sitar-lab/NeuSight (MIT): forward and backward passes of BERT, GPT and OPT in float32 on one A100
  and one H100, eager attention (scripts/asplos/label/*/*-train-*.json)

The figures of the profiles were written down before the tables were opened (the commit that added
`vitsweep/rates/profiles`). The A100 rows of llm-foundry then gave two numbers, `profile_rates.OVERHEAD` and
`STEP_LOG_ERROR`; all other regimes had no part in any constant. Language models are computed by
`analysis.closed_trace`.
"""

import csv
import io
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.closed_trace import closed_trace
from benchmarks.kept import keep
from benchmarks.published_neusight import neusight
from benchmarks.published_rows import Row, gpt, mesh_of, text_of, with_figure
from vitsweep.extras.predict.profile_rates import TableRates
from vitsweep.extras.predict.step_time import predict_step
from vitsweep.planning.closed_memory import Sizes
from vitsweep.rates.profile import profile_named

HALF: dict[str, Any] = {
    "compute": "bfloat16",
    "stream": 2,
    "inner": 2,
    "gathered": 2,
    "exchanged": 2,
}
"""Numbers on the way; parameters, gradients and moments are held in float32."""


def vtrain(folder: Path) -> Iterator[Row]:
    """Megatron-LM on A100: 8 GPUs and 800 Gb/s a node, unfused attention, gradients exchanged at the end."""
    a100 = profile_named("a100_80g")
    source = "800 Gb/s per node of 8, vTrain's configurations"
    rates = TableRates(with_figure(a100, "nic_gb_s", 12.5, source))
    for name in ("multi", "single"):
        text = text_of(folder / "vTrain", f"data/ground_truth_{name}.csv")
        for line in csv.DictReader(io.StringIO(text.lstrip("\ufeff"))):
            number = {key: float(value) for key, value in line.items() if value}
            whole = {key: int(value) for key, value in number.items()}
            t, d, p = (whole[f"{axis} parallelism"] for axis in ("tensor", "data", "pipeline"))
            mesh = mesh_of(pipeline=p, replicate=d, tensor=t)
            depth, width, tokens = whole["# layers"], whole["hidden size"], whole["sequence length"]
            model = gpt(depth, width, whole["attention heads"], tokens, 51200 // t, fused=False)
            trace = closed_trace(
                Sizes(
                    **model,
                    **HALF,
                    gradient=2,
                    mesh=mesh,
                    ranks_per_node=8,
                    micro_batch=whole["micro batch"],
                    micro_batches=whole["global batch"] // (d * whole["micro batch"]),
                    recompute="blocks",
                )
            )
            waited = tuple(replace(c, purpose="activation") for c in trace.collectives)
            found = predict_step(replace(trace, collectives=waited), rates)
            gpus = whole["# GPUs"]
            yield Row(
                regime="A100, Megatron, 64 to 512 GPUs"
                if name == "multi"
                else "A100, Megatron, 1 node",
                group=f"{depth}x{width} s{tokens} on {gpus}, batch {whole['global batch']}",
                label=f"{depth}x{width} s{tokens} t{t} d{d} p{p} micro {whole['micro batch']}",
                measured_ms=number["iteration time (ms)"],
                prediction=found,
            )


MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
"""Depth, width and heads in scripts/train/yamls/pretrain/mpt-*.yaml."""
CHIPS = {"h100_80gb": "h100", "a100_80gb": "a100_80g", "a100_40gb": "a100_40g"}


def llm_foundry(folder: Path) -> Iterator[Row]:
    """FSDP over all GPUs, bfloat16 gathered and reduced, fused causal attention, AdamW per tensor list."""
    text = text_of(folder / "llm-foundry", "scripts/train/benchmarking/README.md")
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or set(line) <= set("|- "):
            continue
        if cells[0] == "Model":
            header = cells
            continue
        row = dict(zip(header, cells, strict=False))
        if row.get("GPU") not in CHIPS or row.get("Precision") not in ("bf16", "amp_bf16"):
            continue
        yield _mpt(row)


def _mpt(row: dict[str, str]) -> Row:
    gpus, tokens = int(row["# GPUs"]), int(row["SeqLen (T)"])
    per_second = float(row["Throughput (T/s)"])
    mesh = mesh_of(shard=gpus)
    sizes = Sizes(
        **gpt(*MPT[row["Model"]], tokens, 50368, fused=True),
        **HALF,
        mesh=mesh,
        ranks_per_node=8,
        micro_batch=int(row["MicroBatchSize"]),
        micro_batches=int(row["GradAccum"]),
        sharded=True,
        recompute="blocks" if row["Activation Checkpointing"] == "True" else "none",
        update="foreach",
    )
    images = sizes.micro_batch * sizes.micro_batches * gpus
    chip = CHIPS[row["GPU"]]
    found = predict_step(closed_trace(sizes), TableRates(profile_named(chip)))
    size = "1 node" if gpus <= 8 else "2 to 8 nodes" if gpus <= 64 else "16 to 64 nodes"
    return Row(
        regime=f"{chip[:4].upper()}, FSDP, {size}",
        group=f"{row['Model']} on {gpus} {chip}",
        label=f"{row['Model']} s{tokens} on {gpus} {chip}, micro-batch {sizes.micro_batch}",
        measured_ms=1e3 * images * tokens / per_second,
        prediction=found,
    )


VITS = {"tiny": (192, 3, 12), "small": (384, 6, 12), "base": (768, 12, 12), "large": (1024, 16, 24)}
"""Width, heads, depth; the MLP is four times as wide, the head has 1,000 classes."""


def timm(folder: Path) -> Iterator[Row]:
    """One RTX 3090, PyTorch 1.12, autocast to float16, attention in plain operators, SGD per list."""
    tables = folder / "pytorch-image-models"
    text = text_of(tables, "results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv")
    rates = TableRates(profile_named("rtx_3090"))
    for row in csv.DictReader(io.StringIO(text)):
        shape = re.fullmatch(r"(?:vit|deit)_(tiny|small|base|large)_patch(\d+)_(\d+)", row["model"])
        if not shape:
            continue
        width, heads, depth = VITS[shape[1]]
        patch, side = int(shape[2]), int(row["train_img_size"])
        patches = (side // patch) ** 2
        sizes = Sizes(
            compute="float16", optimizer=4, mesh=mesh_of(), ranks_per_node=1,
            micro_batch=int(row["train_batch_size"]), update="foreach",
            depth=depth, width=width, heads=heads, mlp_width=4 * width, tokens=patches + 1,
            edge_parameters=(3 * patch**2 + patches + 5) * width + 1000 * (width + 1),
            edge_products=((patches, width, 3 * patch**2), (1, 1000, width)), fused_attention=False,
        )  # fmt: skip
        yield Row(
            regime="RTX 3090, ViT, 1 GPU",
            group=row["model"],
            label=f"{row['model']} batch {row['train_batch_size']}",
            measured_ms=float(row["train_step_time"]),
            prediction=predict_step(closed_trace(sizes), rates),
        )


def regimes(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return regime -> rows, median and 90th percentile of the absolute error, bias, interval coverage."""
    found: dict[str, dict[str, float]] = {}
    for regime in sorted({row.regime for row in rows}):
        own = [row for row in rows if row.regime == regime]
        errors = sorted(abs(row.error) for row in own)
        found[regime] = {
            "rows": len(own),
            "median_error": statistics.median(errors),
            "p90_error": errors[math.ceil(0.9 * len(errors)) - 1],
            "bias": statistics.median(row.error for row in own),
            "held_by_80_percent_interval": sum(row.held for row in own) / len(own),
            "beyond_40_percent": sum(error > 0.4 for error in errors),
        }
    return found


def regrets(rows: list[Row], fewest: int = 5) -> dict[str, Any]:
    """How much slower than the best is the best of the first 1, 3, 10 predicted, over groups of layouts."""
    from scipy.stats import spearmanr

    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    lost: dict[int, list[float]] = {1: [], 3: [], 10: []}
    ranks = []
    for own in groups.values():
        if len(own) < fewest:
            continue
        ordered = sorted(own, key=lambda row: row.prediction.step_time_ms)
        best = min(row.measured_ms for row in own)
        for first, values in lost.items():
            values.append(min(row.measured_ms for row in ordered[:first]) / best - 1)
        predicted = [row.prediction.step_time_ms for row in own]
        ranks.append(float(spearmanr(predicted, [row.measured_ms for row in own]).statistic))
    return {
        "groups": len(ranks),
        "spearman_mean": statistics.fmean(ranks) if ranks else None,
        **{
            f"regret_at_{first}": {"mean": statistics.fmean(v), "max": max(v)}
            for first, v in lost.items()
            if v
        },
    }


def main(folder: Path) -> None:
    """Print the tables and keep the figures."""
    rows = [*vtrain(folder), *llm_foundry(folder), *timm(folder), *neusight(folder)]
    by_regime = regimes(rows)
    for regime, figures in by_regime.items():
        print(f"{regime:34s}", {k: round(v, 3) for k, v in figures.items()})
    layouts = {
        regime: regrets([row for row in rows if row.regime == regime])
        for regime in by_regime
        if "Megatron" in regime
    }
    for regime, figures in layouts.items():
        print(f"{regime:34s}", figures)
    print("beyond 40 %:")
    for row in sorted(rows, key=lambda row: -abs(row.error))[:40]:
        if abs(row.error) > 0.4:
            parts = {k: round(v) for k, v in row.prediction.parts_ms.items() if v > 0.5}
            print(
                f"  {row.error:+.0%} {row.regime}: {row.label}; {row.measured_ms:.0f} ms; {parts}"
            )
    keep("published_throughput", {"regimes": by_regime, "layouts": layouts})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
