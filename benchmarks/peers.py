"""A training step of vitsweep's ViT beside those of transformers, timm and torchvision.

    python benchmarks/peers.py [--device cpu|cuda] [--models vit_tiny vit_base] [--blocks 5] [--smoke]
    python benchmarks/peers.py --memory        # what the tensors need, apart from the C library's heap

Every contender trains the same shape on the same batch of synthetic images with the same optimizer
(AdamW, fused) and the same precision. Blocks hold one run of every contender, each in a fresh
process, in random order; the ratio is taken within a block, its interval over blocks (Student's t).
Peak memory is the allocator's (CUDA), or what the process grew by from before the model was built
(CPU): the libraries' own code is not counted. What the heap of the C library keeps between tensors is;
with `--memory` each tensor is mapped by itself, which is slower, so that only tensors count. Peers
that cannot be imported are named.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from kept import RESULTS, keep

SHAPES = {  # depth, width, heads, mlp: DeiT (arXiv:2012.12877) and ViT (arXiv:2010.11929)
    "vit_tiny": (12, 192, 3, 768),
    "vit_base": (12, 768, 12, 3072),
    "vit_large": (24, 1024, 16, 4096),
}
BATCH = {"cpu": {"vit_tiny": 8, "vit_base": 2, "vit_large": 1},
         "cuda": {"vit_tiny": 512, "vit_base": 256, "vit_large": 96}}  # fmt: skip
PEERS = {
    "transformers": "transformers.models.vit.modeling_vit",
    "timm": "timm.models.vision_transformer",
    "torchvision": "torchvision.models.vision_transformer",
}
OURS = (
    "vitsweep batch_first",
    "vitsweep batch_second",
    "vitsweep mha_module",
    "vitsweep sdpa_math",
)


@dataclass(frozen=True)
class Setting:
    """What one run trains."""

    contender: str
    model: str
    precision: str
    device: str
    resolution_px: int
    warm_up: int
    steps: int
    tensors_alone: bool = False

    @property
    def batch(self) -> int:
        """Images per step."""
        return BATCH[self.device][self.model]


def recipe(setting: Setting) -> Callable[[], Any]:
    """Return what builds a contender, imported and configured.

    The model's forward pass maps (B, 3, R, R) to logits (B, 1000).
    """
    family, _, variant = setting.contender.partition(" ")
    return {
        "vitsweep": ours,
        "transformers": transformers,
        "timm": timm,
        "torchvision": torchvision,
    }[family](setting, variant)


def ours(setting: Setting, variant: str) -> Callable[[], Any]:
    """vitsweep's own model, through its own conf/."""
    from vitsweep.composition.composer import Composer
    from vitsweep.model.build import build_model
    from vitsweep.planning.sweep_plan import plan_cell
    from vitsweep.spec.resources import Machine

    knob = f"layout={variant}" if variant.startswith("batch") else f"attention={variant}"
    overrides = [f"model={setting.model}", "data=synthetic", knob, "resources.device=cpu",
                 f"batch.resolution_px={setting.resolution_px}"]  # fmt: skip
    cell = plan_cell(Composer().compose(overrides), Machine.here()).spec
    return lambda: cell.attention.apply(build_model(cell))


def transformers(setting: Setting, attention: str) -> Callable[[], Any]:
    """Hugging Face's ViT with dropout off, as its default is."""
    from torch import nn
    from transformers import ViTConfig, ViTForImageClassification

    depth, width, heads, mlp = SHAPES[setting.model]
    config = ViTConfig(
        num_hidden_layers=depth, hidden_size=width, num_attention_heads=heads, intermediate_size=mlp,
        image_size=setting.resolution_px, num_labels=1000, attn_implementation=attention,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, images: Any) -> Any:
            return self.model(images).logits

    return Logits


def timm(setting: Setting, _: str) -> Callable[[], Any]:
    """timm's VisionTransformer."""
    from timm.models.vision_transformer import VisionTransformer

    depth, width, heads, mlp = SHAPES[setting.model]
    return partial(
        VisionTransformer,
        img_size=setting.resolution_px,
        depth=depth,
        embed_dim=width,
        num_heads=heads,
        mlp_ratio=mlp / width,
    )


def torchvision(setting: Setting, _: str) -> Callable[[], Any]:
    """torchvision's VisionTransformer."""
    from torchvision.models.vision_transformer import VisionTransformer

    depth, width, heads, mlp = SHAPES[setting.model]
    return partial(VisionTransformer, setting.resolution_px, 16, depth, heads, width, mlp)


def measure(setting: Setting, answer: Path) -> None:
    """Train some steps in this fresh process; write the median step time and the peak memory."""
    import torch

    from vitsweep.measure.memory import reset_peak
    from vitsweep.training.timed_steps import StepClock

    torch.manual_seed(0)
    device = torch.device(setting.device)
    make = recipe(setting)
    if setting.tensors_alone:
        _map_each_tensor()
    reset_peak(device)
    before_gib = _peak_gib(device) if device.type == "cpu" else 0.0
    model = make().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    side = setting.resolution_px
    images = torch.randn(setting.batch, 3, side, side, device=device)
    labels = torch.randint(1000, (setting.batch,), device=device)
    half = torch.autocast(setting.device, torch.bfloat16, enabled=setting.precision == "bf16")
    clock = StepClock(device)
    for _ in range(setting.warm_up + setting.steps):
        clock.mark()
        with half:
            loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.mark()
    result = {
        "step_ms": statistics.median(clock.times_ms()[setting.warm_up :]),
        "peak_gib": _peak_gib(device) - before_gib,
    }
    answer.write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)


def _map_each_tensor() -> None:
    """Let malloc map every block from 64 KiB on and give it back when it is freed (mallopt(3))."""
    library, threshold_of_mapping = ctypes.CDLL(None), -3
    library.mallopt(threshold_of_mapping, 64 * 1024)
    library.malloc_trim(0)


def _peak_gib(device: Any) -> float:
    from vitsweep.measure.memory import peak_memory

    return next(gib for gib in peak_memory(device).values() if gib is not None)


def available() -> tuple[list[str], list[str]]:
    """Return the contenders that can be imported here, and the peers that cannot, with the reason."""
    found, absent = list(OURS), []
    peers = {"transformers": ["sdpa", "eager"], "timm": [""], "torchvision": [""]}
    for name, variants in peers.items():
        reason = _import_error(name)
        if reason:
            absent.append(f"{name}: {reason}")
        else:
            found += [f"{name} {variant}".strip() for variant in variants]
    return found, absent


def _import_error(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        __import__(PEERS[name])
    except Exception as error:  # whatever keeps a peer from running here is its own
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


@cache
def forks() -> Any:
    """Return where fresh processes come from: a server that has imported what all contenders need."""
    context = multiprocessing.get_context("forkserver")
    needed = [
        "torch",
        "torch._dynamo",
        "vitsweep.cell",
        "vitsweep.planning.sweep_plan",
        "vitsweep.composition.composer",
    ]
    peers = [PEERS[name] for name in PEERS if not _import_error(name)]
    context.set_forkserver_preload([*needed, *peers])
    return context


def run(setting: Setting, folder: Path) -> dict[str, float]:
    """Measure in a fresh process."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    process = forks().Process(target=measure, args=(setting, answer))
    process.start()
    process.join()
    if not answer.exists():
        raise SystemExit(f"{setting.contender} failed on {setting.model} in {setting.precision}")
    return dict(json.loads(answer.read_text(encoding="utf-8")))


def compare(samples: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return one row per contender: step time, memory, and its speed relative to vitsweep's best."""
    medians = {c: statistics.median(s["step_ms"] for s in runs) for c, runs in samples.items()}
    best = min(OURS, key=lambda contender: medians[contender])
    return [
        {
            "contender": contender,
            "step_ms": medians[contender],
            "peak_gib": statistics.median(s["peak_gib"] for s in runs),
            "vitsweep_best": best,
            **_ratio(samples[best], runs),
            "runs": runs,
        }
        for contender, runs in samples.items()
    ]


def _ratio(
    ours_: list[dict[str, float]], theirs: list[dict[str, float]]
) -> dict[str, float | None]:
    """How many times as fast as the contender vitsweep's best is, with a 95 % interval over blocks."""
    logs = np.log([b["step_ms"] / a["step_ms"] for a, b in zip(ours_, theirs, strict=True)])
    mean = float(np.mean(logs))
    if len(logs) < 3 or not np.any(logs):
        return {"vitsweep_speedup": float(np.exp(mean)), "low": None, "high": None}
    from scipy import stats  # `gpu.py`, which needs no interval, imports this module

    half = float(stats.t.ppf(0.975, len(logs) - 1) * np.std(logs, ddof=1) / np.sqrt(len(logs)))
    return {
        "vitsweep_speedup": float(np.exp(mean)),
        "low": float(np.exp(mean - half)),
        "high": float(np.exp(mean + half)),
    }


def main() -> None:
    """Measure all contenders in paired blocks, print the tables, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--models", nargs="+", default=["vit_tiny", "vit_base"], choices=list(SHAPES)
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run on CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="does it run? small images, few steps")
    parser.add_argument("--memory", action="store_true", help="only the memory of the tensors")
    arguments = parser.parse_args()
    contenders, absent = available()
    side, warm_up, steps = (32, 1, 2) if arguments.smoke else (224, 3, 10)
    if arguments.device == "cpu" and not arguments.smoke:
        warm_up, steps = 1, arguments.steps
    if arguments.memory:
        arguments.blocks, warm_up, steps = 1, 1, 1
    tables = []
    for model in arguments.models:
        for precision in arguments.precisions:
            samples: dict[str, list[dict[str, float]]] = {c: [] for c in contenders}
            for _ in range(arguments.blocks):
                for contender in random.sample(contenders, len(contenders)):
                    setting = Setting(
                        contender,
                        model,
                        precision,
                        arguments.device,
                        side,
                        warm_up,
                        steps,
                        tensors_alone=arguments.memory,
                    )
                    samples[contender].append(run(setting, _scratch()))
            rows = compare(samples)
            tables.append(
                {"model": model, "precision": precision, "batch": setting.batch, "rows": rows}
            )
            show(tables[-1])
    save(arguments, tables, absent)


def show(table: dict[str, Any]) -> None:
    """Print one comparison."""
    print(f"\n{table['model']}, {table['precision']}, batch {table['batch']}")
    print(f"{'contender':26}{'step ms':>10}{'peak GiB':>10}   vitsweep's best is ... times as fast")
    for row in sorted(table["rows"], key=lambda row: row["step_ms"]):
        interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["low"] else ""
        print(f"{row['contender']:26}{row['step_ms']:10.1f}{row['peak_gib']:10.3f}   "
              f"{row['vitsweep_speedup']:.3f}{interval}", flush=True)  # fmt: skip


def save(arguments: argparse.Namespace, tables: list[dict[str, Any]], absent: list[str]) -> None:
    """Keep the result."""
    print(f"\nabsent: {'; '.join(absent) or 'none'}")
    name = f"peers{'-smoke' if arguments.smoke else '-memory' if arguments.memory else ''}"
    settings = {k: str(v) for k, v in vars(arguments).items() if k != "out"}
    figures = {"absent": absent, "settings": settings, "tables": tables}
    keep(name, figures, arguments.out, arguments.device)


def _scratch() -> Path:
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"peers-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    begin = time.time()
    main()
    print(f"{time.time() - begin:.0f} s", file=sys.stderr)
