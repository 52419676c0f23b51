"""The parts of `gpu.py`: each in one process of its own, writing as it goes."""

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_steps
import peers
import torch
from gpu_list import (
    ATTENTION,
    BASE,
    BLOG,
    BLOG_NAME,
    COMMANDS,
    KERNELS,
    MODELS,
    NO_DEVICE,
    OURS,
    SINGLE_CHOICES,
    STACK,
    STACKS,
    UPDATES,
)
from gpu_prediction import prediction
from gpu_product import commands, product, soak
from gpu_profile import profile
from gpu_smoke import smoke
from gpu_steps import SMOKE, Figures, Run, Size, cell_of, end_if_lost, largest_batch, reason_of
from gpu_turns import Contender, ours, theirs, time_in_turns
from reached_rates import calibrate

from vitsweep.model.attention import Attention
from vitsweep.spec.resources import MeshShape
from vitsweep.world import World

KERNEL_TOKENS = 2**16
"""Tokens of a call of an attention kernel: 332 images of 197."""
TURN_S = {"peers": 2.0, "one_at_a_time": 0.7, "models": 2.0}
"""Part -> timed seconds of one turn."""


def beside_peers(run: Run) -> None:
    """ViT-L/16 in bfloat16 beside timm, torchvision and transformers, eager and compiled."""
    size, spec = run.size, cell_of(run.size, images=16).transformer
    peers.SHAPES[size.model] = spec.depth, spec.width, spec.num_heads, spec.mlp_width
    shape = MeshShape(pipeline=1, replicate=1, shard=1, sequence=1, ring=1, ulysses=1, tensor=1)
    device = torch.device(size.device)
    alone = World(rank=0, local_rank=0, size=1, device=device, shape=shape, mesh=None)
    facts = {"rates": run.earlier.get("rates") or calibrate(alone)}
    facts["images"] = images = run.earlier.get("images") or largest_batch(size, *BASE)
    found, facts["absent peers"] = peers.available()
    others = [name for name in found if not name.startswith("vitsweep") and "eager" not in name]
    stacks = [ours(name, size, *choices, images=images) for name, choices in STACKS.items()]
    own = [
        ours(f"vitsweep {name}", size, *BASE, f"compilation={name}", images=images)
        for name in (*reversed(OURS), "compile_model")
    ]
    tflop = own[0].model_tflop
    by_scope = {
        scope: [theirs(n, size, images, compiled=scope, model_tflop=tflop) for n in others]
        for scope in ("nothing", "blocks", "model")
    }
    # Blocks compile for seconds; whole models for up to a minute each, after the turns of all others.
    groups = (
        [*stacks, own[0], *by_scope["blocks"], own[1], *by_scope["nothing"]],
        [own[-1], *by_scope["model"]],
    )
    _measured(groups, run, 3, facts)


def one_at_a_time(run: Run) -> None:
    """Each technique alone over one rank, bfloat16 and fused AdamW; the blog's baseline under TF32."""
    size, beside = run.size, run.figures_of("peers")
    small, large = 32, beside.get("images") or largest_batch(size, *BASE)
    if size.seconds == 0:
        small = 4
    images = max(16, large // 2 // 16 * 16)  # FP8 wants multiples of 16; half takes half the time
    contenders = [
        ours(" ".join(choice) or "base", size, *BASE, *choice, images=images)
        for choice in SINGLE_CHOICES
    ]
    contenders.insert(-2, ours(BLOG_NAME, size, *BLOG, images=images))
    contenders[-2:-2] = [
        ours(f"optimizer=adamw_{each} at {small} images", size, BASE[0], f"optimizer=adamw_{each}",
             images=small)
        for each in UPDATES
    ]  # fmt: skip
    _measured([contenders], run, 2, {"rates": beside.get("rates", {})})


def models(run: Run) -> None:
    """The best stack on models of other sizes, eager bfloat16 beside it."""
    contenders = [
        ours(f"{model} {name}", size, *choices, images=images)
        for model, images in ([("vit_tiny", 4)] if run.size.seconds == 0 else MODELS)
        for size in [replace(run.size, model=model)]
        for name, choices in (("eager", BASE), ("best stack", STACK))
    ]
    _measured([contenders], run, 2, {"rates": run.figures_of("peers").get("rates", {})})


def _measured(groups: Any, run: Run, turns: int, facts: Figures) -> None:
    """Measure groups of contenders one after the other; the file holds `facts` and a row of each."""
    contenders: list[Contender] = [contender for group in groups for contender in group]
    before = {row["name"]: row for row in run.earlier.get("rows", [])}
    for contender in contenders:
        if contender.name in before:
            contender.go_on_from(before[contender.name])

    def finished() -> None:
        run.write(facts | {"rows": [contender.row(facts["rates"]) for contender in contenders]})

    seconds = min(run.size.seconds, TURN_S[run.path.stem])
    turns = turns if seconds else 1
    for group in groups:
        time_in_turns(group, replace(run, size=replace(run.size, seconds=seconds)), turns, finished)
    finished()


def attention(run: Run) -> None:
    """Kernels at 197 to 64K tokens, forward and backward, 16 heads of width 64."""
    cases = ATTENTION
    if run.size.seconds == 0:
        cases = (*((kernel, tokens) for tokens in (17, 64) for kernel in KERNELS), ("flex", 64))
    rows: dict[tuple[str, int], Figures] = {
        (row["kernel"], row["tokens"]): row for row in run.earlier.get("rows", [])
    }
    for kernel, tokens in cases:
        if (kernel, tokens) in rows:
            continue
        row: Figures = {"tokens": tokens, "kernel": kernel}
        if run.is_late:
            rows[kernel, tokens] = row | {"reason": gpu_steps.NO_TIME}
            continue
        rows[kernel, tokens] = row | {"reason": gpu_steps.ENDED}
        run.write({"rows": [*rows.values()]})
        rows[kernel, tokens] = row | _kernel(run.size, kernel, tokens)
        run.write({"rows": [*rows.values()]})
        end_if_lost(run.size)
    run.write({"rows": [*rows.values()]})


def _kernel(size: Size, name: str, tokens: int) -> Figures:
    batch = 1 if size.seconds == 0 else max(1, KERNEL_TOKENS // tokens)
    try:
        cell = cell_of(size, f"attention={name}", "precision=bf16", images=16)
        model: Any = torch.nn.Module()
        model.attention = Attention(1024, 16, batch_first=True)
        attend = cell.attention.apply(model).attention.attend
        # As the model has them: parts of one product of all three, heads beside one another.
        packed = torch.randn(
            (batch, tokens, 3, 16, 64), device=size.device, dtype=torch.bfloat16, requires_grad=True
        )
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
        gradient = torch.randn_like(q)

        def work() -> None:
            torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

        seconds = gpu_steps.seconds_of(work, replace(size, seconds=min(0.3, size.seconds)))
        flop = 3.5 * 4 * batch * 16 * tokens * tokens * 64  # forward 2 products, backward 5
        return {"batch": batch, "ms": seconds * 1e3, "tflops": flop / seconds / 1e12}
    except (Exception, SystemExit) as error:  # a kernel that a length or device lacks has its line
        return {"batch": batch, "reason": reason_of(error)}
    finally:
        gpu_steps.release(size)


PARTS: dict[str, Callable[[Run], None]] = {
    "product": product,
    **dict.fromkeys(COMMANDS, commands),
    "peers": beside_peers,
    "attention": attention,
    "one_at_a_time": one_at_a_time,
    "soak": soak,
    "profile": profile,
    "smoke": smoke,
    "prediction": prediction,
    "models": models,
}


def main(part: str, out: str, device: str, deadline: float) -> None:
    """Run one part until its deadline; `<part>.json` holds what there is."""
    if device == "cuda":
        # In another process: a context of this one would stand beside those of the commands that it runs.
        check = multiprocessing.get_context("fork").Process(target=_end_without_gpu)
        check.start()
        check.join()
        if check.exitcode:
            os._exit(NO_DEVICE)
    path = Path(out) / f"{part}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    size = SMOKE if device == "cpu" else Size(device)
    PARTS[part](Run(size, path, deadline, earlier))


def _end_without_gpu() -> None:
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        reason = str(error).strip().splitlines()[0]
        print(f"torch {torch.__version__}, {built}, sees no GPU: {reason}", flush=True)
        os._exit(NO_DEVICE)
