"""What the parts of `gpu.py` run, in which order and for how many seconds each (no torch, for `--dry`)."""

from dataclasses import dataclass

from vitsweep.composition.conf_dir import conf_dir
from vitsweep.spec.technique import TECHNIQUE_GROUPS

START_S = 12.0
"""Seconds of a part in which Python imports torch and CUDA starts."""
BASE = ("precision=bf16", "optimizer=adamw_fused")
NEEDS = {
    "attention=sdpa_causal": ("classifier=pooled",),
    "attention=sdpa_cudnn": ("precision=bf16",),
    "attention=sdpa_cudnn_first": ("precision=bf16",),
    "attention=sdpa_flash": ("precision=bf16",),
    "memory=budget": ("compilation=compile_blocks",),
    "optimizer=adamw_stochastic": ("precision=bf16_params",),
    "precision=fp8": ("compilation=compile_blocks",),
    "sequence_parallel=dsp": ("model=video_vit_nano", "data=synthetic_video"),
    "sequence_parallel=lasp": ("attention=linear", "attention.causal=true", "classifier=pooled"),
    "sequence_parallel=lasp2": ("attention=linear",),
    "sequence_parallel=segment_local": ("classifier=pooled",),
}
"""Technique -> choices without which it is refused, or slow."""
KNOBS = ("layout.patch_embedding=linear", "layout.cudnn_benchmark=true")
"""Settings of a choice that take another way through the code."""
OURS = ("eager", "compile_blocks")
"""Compilations beside which the peers are measured."""
PEERS = ("timm", "torchvision", "transformers")
SINGLE_CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    ("compilation=compile_blocks",),
    ("compilation=compile_model",),
    ("compilation=cuda_graphs",),
    *((f"precision={p}",) for p in ("fp32", "tf32", "O1", "O2", "O3", "bf16_params")),
    ("precision=bf16_params", "optimizer=adamw_stochastic"),
    ("precision=bf16_masters",),
    ("precision=fp8", "compilation=compile_blocks"),
    ("layout=batch_second",),
    ("layout.channels_last=true",),
    ("layout.patch_embedding=linear",),
    ("layout.cudnn_benchmark=true",),
    ("classifier=pooled",),
    ("memory=recompute_blocks",),
    ("memory=offload_activations",),
    *((f"optimizer=adamw_{each}",) for each in ("loop", "foreach", "contiguous")),
    ("optimizer=muon",),
)
"""What is measured alone over `BASE`."""
UPDATES = ("loop", "foreach", "fused", "contiguous")
"""Implementations of AdamW that are measured at a small batch too."""
BLOG = ("precision=tf32", "optimizer=adamw_loop", "attention=mha_module")
BLOG_NAME = "the blog's baseline as torch 1.11 ran it"
LENGTHS = (197, 1024, 4096, 16384, 65536)
KERNELS = ("sdpa_auto", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex")
PROFILED: dict[str, tuple[str, ...]] = {
    "eager": (),
    "compile_blocks": ("compilation=compile_blocks",),
}
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
)
"""(model, images, choices over `BASE`) of the cells whose predictions are compared with measurements."""


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        name: of its file.
        seconds: of eight minutes, with its start.
        question: what it answers.
        items: what it runs, in this order as far as the time goes.
    """

    name: str
    seconds: float
    question: str
    items: tuple[str, ...]

    def plan(self, scale: float) -> list[str]:
        """Return the lines of `--dry`; each item has an equal share of what the start leaves."""
        seconds = self.seconds * scale
        share = max(seconds - START_S, 0.2 * seconds) / len(self.items)
        head = f"{seconds:6.0f} s  {self.name:14} {self.question}"
        return [head, *(f"        - {share:4.1f} s  {item}" for item in self.items)]


def choices() -> list[str]:
    """Return every choice of every group of techniques, and `KNOBS`."""
    found = [
        f"{group}={path.stem}"
        for group in TECHNIQUE_GROUPS
        for path in sorted((conf_dir() / group).glob("*.yaml"))
    ]
    return [*found, *KNOBS]


PARTS = (
    Part(
        "smoke",
        60,
        "Does one step of every technique run, and the causal kernel with padding?",
        (*choices(), "causal kernel of rings, with and without padding"),
    ),
    Part(
        "peers",
        130,
        "ViT-L/16, bfloat16: how fast beside timm, torchvision, transformers?",
        (
            "sustained rates of products and copies",
            *(f"vitsweep {name}" for name in OURS),
            *(f"{name}, where it is installed" for name in PEERS),
            *(f"{name} compiled" for name in PEERS),
        ),
    ),
    Part(
        "one_at_a_time",
        160,
        "What does each technique bring, alone?",
        (
            *(" ".join(each) or "base" for each in SINGLE_CHOICES),
            *(f"optimizer=adamw_{each} at 32 images" for each in UPDATES),
            BLOG_NAME,
        ),
    ),
    Part(
        "attention",
        45,
        "Which attention kernel is fastest at which length?",
        tuple(f"{kernel} at {tokens} tokens" for tokens in LENGTHS for kernel in KERNELS),
    ),
    Part("profile", 40, "Where does the time of a step go?", tuple(PROFILED)),
    Part(
        "prediction",
        45,
        "How far are predicted from measured steps and peaks of memory?",
        tuple(f"model={m} at {n} images {' '.join(c)}".strip() for m, n, c in PREDICTED),
    ),
)
"""They add up to eight minutes."""
