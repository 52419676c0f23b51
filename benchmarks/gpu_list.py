"""What the parts of `gpu.py` run, in which order and for how many seconds each (no torch, for `--dry`)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

from vitsweep.execution.process import log_to
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import conf_dir

LATEST_START = 0.85
"""Share of a part's time after which nothing more is begun; what is under way then may end."""
DEVICE_LOST, NO_DEVICE = 75, 76
"""Exit codes of a part's process: after a fault that no later kernel survives; where it sees no GPU."""
BASE = ("precision=bf16", "optimizer=adamw_fused")
NEEDS = {
    "attention=sdpa_causal": ("classifier=pooled",),
    "attention=sdpa_cudnn": ("precision=bf16",),
    "attention=sdpa_cudnn_first": ("precision=bf16",),
    "attention=sdpa_flash": ("precision=bf16",),
    "precision=fp8": ("precision.layers=all",),
    "precision=fp8_masters": ("precision.layers=all",),
    "sequence_parallel=dsp": ("precision=bf16", "model=video_vit_nano", "data=synthetic_video"),
    "sequence_parallel=lasp": (
        *("precision=bf16", "attention=linear", "attention.causal=true", "classifier=pooled"),
    ),
    "sequence_parallel=lasp2": ("precision=bf16", "attention=linear"),
    "sequence_parallel=lss": ("precision=bf16",),
    "sequence_parallel=megatron_sp": ("precision=bf16",),
    "sequence_parallel=ring": ("precision=bf16",),
    "sequence_parallel=ulysses": ("precision=bf16",),
    "sequence_parallel=usp": ("precision=bf16",),
}
"""Technique -> choices without which it is refused, slow, or computed by other kernels than on a GPU."""
OF_THE_PROCESS = ("runtime", "loader")
"""Groups that change how processes start or batches are read: a step on a batch in memory shows neither."""
KNOBS = ("layout.patch_embedding=linear", "layout.cudnn_benchmark=true")
"""Settings of a choice that take another way through the code."""
RING_KERNELS = {"ring of 8 ranks": (8, 1), "zigzag ring of 4 ranks": (4, 2)}
"""Causal rings over 196 tokens, which neither divides: name -> (ranks, parts of each rank)."""
RISKY = (
    "precision=fp8",
    "sequence_parallel=ring",
    "sequence_parallel=usp",
)
"""Choices whose kernels run on GPUs only; tried first."""
COMPILED: tuple[tuple[str, ...], ...] = (
    ("compilation=compile_blocks",),
    ("precision=fp8", "precision.layers=all", "compilation=compile_blocks"),
    ("attention=flex",),
    ("compilation=compile_model",),
    ("compilation=compile_model", "compilation.mode=reduce_overhead", *BASE),
)
"""Cases for which kernels are compiled, for seconds each; tried last."""
ONLY_COMPILED = (
    "compilation=compile_blocks",
    "compilation=compile_model",
    "attention=flex",
)
"""Choices of which `COMPILED` has all there is."""
STACK = (
    "precision=bf16_masters",
    "optimizer=adamw_fused",
    "layout.patch_embedding=linear",
    "attention=sdpa_cudnn_first",
    "compilation=compile_blocks",
)
"""The best combination in half precision, as in `conf/sweep/best_stack.yaml`."""
STACKS: dict[str, tuple[str, ...]] = {
    "vitsweep's best stack": STACK,
    "vitsweep's best stack in FP8": ("precision=fp8_masters", *STACK[1:]),
}
"""Name -> choices that stand beside the peers."""
ONE_RANK = ("resources.ranks_per_node=1", "sharding=none", "data=synthetic")
PRODUCT_CELLS: tuple[tuple[str, ...], ...] = (
    ("precision=bf16",),
    ("precision=bf16", "compilation=compile_blocks"),
    (STACK[0], *STACK[2:]),
    ("precision=fp8_masters", "precision.layers=all", "compilation=compile_blocks"),
)
"""What the product itself measures first, kernels of eager PyTorch before compiled ones."""


def product_sweep(cells: tuple[tuple[str, ...], ...], *settings: str) -> tuple[str, ...]:
    """Return what is typed for a sweep of some cells on one rank, without looks."""
    return (
        *ONE_RANK, *settings, "optimizer=adamw_fused", "measurement=smoke", "measurement.prove=twin",
        "sweep.prune_slowdown=null", f"sweep.cells={json.dumps(cells)}",
    )  # fmt: skip


PRODUCT = product_sweep(
    PRODUCT_CELLS, "model=vit_tiny", "measurement.blocks=2", "measurement.trace=true",
    "measurement.warmup_min_seconds=0.5", "measurement.min_seconds=1",
    "sweep.baseline={precision: bf16, optimizer: adamw_fused}",
)  # fmt: skip
PRODUCT_SMOKE = product_sweep(
    PRODUCT_CELLS[:1], "model=vit_nano", "batch.images_per_step=4", "batch.resolution_px=8",
    "sweep.baseline={optimizer: adamw_fused}",
)  # fmt: skip
OURS = ("eager", "compile_blocks")
"""Compilations beside which the peers are measured."""
PEERS = ("timm", "torchvision", "transformers")
SINGLE_CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    ("compilation=compile_blocks",),
    ("precision=fp8", "compilation=compile_blocks"),
    ("precision=tf32",),
    *((f"precision={p}",) for p in ("O2", "bf16_params", "O1", "O3")),
    ("memory=recompute_blocks",),
    *((f"optimizer=adamw_{each}",) for each in ("loop", "foreach", "contiguous")),
    ("layout=batch_second",),
    ("layout.patch_embedding=linear",),
    ("classifier=pooled",),
    ("precision=bf16_masters",),
    ("optimizer=muon",),
    ("layout.channels_last=true",),
    ("layout.cudnn_benchmark=true",),
    ("precision=fp32",),
    ("compilation=compile_model",),
)
"""What is measured alone over `BASE`, the most wanted first: time may end before the list does."""
UPDATES = ("loop", "foreach", "fused", "contiguous")
"""Implementations of AdamW that are measured at a small batch too."""
BLOG = ("precision=tf32", "optimizer=adamw_loop", "attention=mha_module")
BLOG_NAME = "the blog's baseline as torch 1.11 ran it"
LENGTHS = (197, 1024, 4096, 16384, 65536)
KERNELS = ("sdpa_auto", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
ATTENTION = (
    *((kernel, tokens) for tokens in LENGTHS for kernel in KERNELS),
    *(("flex", tokens) for tokens in LENGTHS),
)
"""(kernel, tokens); what is compiled for every length comes last."""
PROFILED: dict[str, tuple[str, ...]] = {
    "eager": (),
    "compile_blocks": ("compilation=compile_blocks",),
}
BATCHES = {
    "vit_tiny": (64, 256, 1024), "vit_small": (64, 256, 512), "vit_base": (32, 128, 256),
    "vit_large": (16, 64, 128), "vit_huge_14": (8, 32, 64),
}  # fmt: skip
DRAWN_CHOICES = (
    *(f"precision={each}" for each in ("fp32", "tf32", "O1", "O2", "O3", "bf16_params")),
    *(f"attention=sdpa_{each}" for each in ("flash", "efficient", "math")),
    *(f"optimizer=adamw_{each}" for each in ("loop", "foreach")),
    *("memory=recompute_blocks", "layout=batch_second", "classifier=pooled"),
    "layout.patch_embedding=linear",
)
"""What cells are drawn from, none, one or two at a time; compilers take too long here."""


def drawn_cells(count: int, seed: int = 23) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return (model, images, choices over `BASE`) of some cells, no group twice in one."""
    draw, found = Random(seed), []
    while len(found) < count:
        model = draw.choice([*BATCHES])
        chosen = draw.sample(DRAWN_CHOICES, draw.randrange(3))
        if len({each.partition("=")[0] for each in chosen}) == len(chosen):
            found.append((model, draw.choice(BATCHES[model]), tuple(chosen)))
    return found


PREDICTED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("vit_large", 64, ()),
    ("vit_large", 16, ()),
    ("vit_large", 64, ("memory=recompute_blocks",)),
    ("vit_large", 32, ("precision=fp32",)),
    ("vit_large", 64, ("precision=O2",)),
    ("vit_large", 64, ("optimizer=adamw_loop",)),
    ("vit_base", 128, ()),
    ("vit_base", 128, ("attention=sdpa_math",)),
    ("vit_small", 256, ()),
    ("vit_tiny", 256, ("precision=tf32",)),
    *drawn_cells(56),
)
"""(model, images, choices over `BASE`) of the cells whose predictions are compared with measurements."""


MODELS = (("vit_base", 512), ("vit_huge_14", 64), ("vit_giant_14", 48))
"""(model, images) on which the best stack is tried."""


ONE_GPU = "-m resources.ranks_per_node=1 sweep.prune_slowdown=null sweep.report=false"
WINDOW_CELLS = (
    ("precision=O1", "optimizer=adamw_foreach"),
    ("precision=bf16_masters", "optimizer=adamw_fused"),
)
WINDOWS = tuple(
    f"{ONE_GPU} sweep.name=windows_{seconds} measurement.min_seconds={seconds} measurement.blocks={turn} "
    f"'sweep.baseline={{precision: tf32}}' 'sweep.cells={json.dumps(WINDOW_CELLS)}'"
    for turn in (1, 2)
    for seconds in (1.5, 10)
)
"""Three cells in windows of two lengths in turns, a block each: short ones may measure a cool chip."""


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        name: of its file.
        seconds: of nine minutes, where it belongs to `FIRST`.
        question: what it answers.
        items: what it runs, in this order as far as the time goes.
    """

    name: str
    seconds: float
    question: str
    items: tuple[str, ...]

    def plan(self, scale: float) -> list[str]:
        """Return the lines of `--dry`; each item has an equal share of the time in which items begin."""
        seconds = self.seconds * scale
        share = LATEST_START * seconds / len(self.items)
        head = f"{seconds:6.0f} s  {self.name:14} {self.question}"
        return [head, *(f"        - {share:4.1f} s  {item}" for item in self.items)]


def choices() -> list[str]:
    """Return every choice of every group of techniques that a step shows, and `KNOBS`."""
    found = [
        f"{group}={path.stem}"
        for group in GROUPS
        if group not in OF_THE_PROCESS
        for path in sorted((conf_dir() / group).glob("*.yaml"))
    ]
    return [*found, *KNOBS]


def smoke_cases() -> list[tuple[str, ...]]:
    """Return the overrides of each case, the most wanted first, the longest last."""
    elsewhere = (*RISKY, *ONLY_COMPILED)
    others = [choice for choice in choices() if choice not in elsewhere]
    return [*((choice, *NEEDS.get(choice, ())) for choice in (*RISKY, *others)), *COMPILED]


PARTS = (
    Part(
        "product",
        120,
        "Do `python -m vitsweep` and its proof, monitors and records work, and how fast is each cell?",
        tuple(" ".join(cell) for cell in PRODUCT_CELLS),
    ),
    Part(
        "peers",
        140,
        "ViT-L/16, bfloat16: how fast against timm, torchvision, transformers?",
        (
            "sustained rates of products and copies",
            *STACKS,
            *(f"vitsweep {name}" for name in reversed(OURS)),
            *(f"{name} with compiled blocks" for name in PEERS),
            *(f"{name}, where it is installed" for name in PEERS),
            "vitsweep compile_model",
            *(f"{name} compiled" for name in PEERS),
        ),
    ),
    Part(
        "attention",
        30,
        "Which attention kernel is fastest at which length?",
        tuple(f"{kernel} at {tokens} tokens" for kernel, tokens in ATTENTION),
    ),
    Part(
        "one_at_a_time",
        100,
        "What does each technique bring, alone?",
        (
            *(" ".join(each) or "base" for each in SINGLE_CHOICES),
            BLOG_NAME,
            *(f"optimizer=adamw_{each} at 32 images" for each in UPDATES),
        ),
    ),
    Part("soak", 25, "Does the best stack keep its rate once the GPU is warm?", (" ".join(STACK),)),
    Part("profile", 25, "Where does the time of a step go?", tuple(PROFILED)),
    Part(
        "smoke",
        180,
        "Do the causal kernel of rings, and one step of every technique, run?",
        (*RING_KERNELS, *(" ".join(case) for case in smoke_cases())),
    ),
    Part(
        "prediction",
        180,
        "How far are predicted from measured steps and peaks of memory?",
        tuple(f"model={m} at {n} images {' '.join(c)}".strip() for m, n, c in PREDICTED),
    ),
    Part(
        "models",
        180,
        "How fast is the best stack on other models?",
        tuple(f"{model} at {images} images" for model, images in MODELS),
    ),
    Part(
        "speedups",
        540,
        "What do the blog's techniques bring, in five blocks? `results/meta_speedups-cuda` is the sample",
        ("-m +sweep=meta_speedups resources.ranks_per_node=1",),
    ),
    Part(
        "first",
        150,
        "What does a visitor's first sweep show, after how many seconds?",
        ("-m +sweep=first resources.ranks_per_node=1",),
    ),
    Part("windows", 210, "Do windows of 1.5 s and of 10 s give the same ratios?", WINDOWS),
    Part(
        "one_rank",
        130,
        "Do DDP and a bare module differ on one rank, once the clocks have settled?",
        (
            f"{ONE_GPU} sweep.name=one_rank sharding=ddp,none precision=O1 "
            "'sweep.baseline={precision: O1}' measurement.warmup_min_seconds=3 measurement.min_seconds=3",
        ),
    ),
)
COMMANDS = ("speedups", "first", "windows", "one_rank")
"""Parts whose items are commands of vitsweep."""
FIRST = tuple(part.name for part in PARTS[:7])
"""What runs unless others are chosen: nine minutes, complete by themselves."""


def run_part(name: str, work: str, device: str, deadline: float) -> None:
    """Run one part in this process, which was forked from one that has imported torch."""
    os.setsid()
    os.chdir(Path(__file__).parents[1])
    log_to(Path(work) / f"{name}.log")
    from gpu_parts import main

    main(name, work, device, deadline)
