"""The parts of `gpu.py`: what each measures, in one process of its own, writing as it goes."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_steps
import peers
import torch
import torch.distributed as dist
from gpu_list import (
    BASE,
    BLOG,
    BLOG_NAME,
    KERNELS,
    LENGTHS,
    NEEDS,
    OURS,
    PROFILED,
    SINGLE_CHOICES,
    UPDATES,
    choices,
)
from gpu_prediction import prediction
from gpu_steps import (
    SMOKE,
    Contender,
    Size,
    cell_of,
    our_step,
    ours,
    reason_of,
    theirs,
    time_in_turns,
)

from vitsweep.measure.calibrate import calibrate
from vitsweep.spec.mesh_shape import MeshShape
from vitsweep.techniques.sequence_parallel.block_attention import Plain, block_attention
from vitsweep.world import World, device_mesh

Write = Callable[[dict[str, Any]], None]


def world_of(size: Size, *, group: bool) -> World:
    """Return the world of one rank; with a process group of its own where techniques need one."""
    shape = MeshShape(pipeline=1, replicate=1, shard=1, sequence=1, ring=1, ulysses=1, tensor=1)
    device, mesh = torch.device(size.device), None
    if group:
        store = Path(tempfile.mkdtemp()) / "rendezvous"
        dist.init_process_group(
            "nccl" if size.device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=0,
            world_size=1,
        )
        mesh = device_mesh(size.device, shape)
    return World(rank=0, local_rank=0, size=1, device=device, shape=shape, mesh=mesh)


def smoke(size: Size, deadline: float, write: Write) -> None:
    """One step of every technique, and the causal kernel with padding: pass, or the reason."""
    world, results = world_of(size, group=True), {}
    small = Size(size.device, "vit_tiny", SMOKE.resolution_px, ("model.depth=2",))
    for choice in choices():
        if time.monotonic() > deadline:
            results[choice] = "no time was left"
            continue
        results[choice] = _one_step(small, choice, world)
        write({"steps": results})
    write({"steps": results, "causal kernel": _causal_kernel(size)})
    dist.destroy_process_group()


def _one_step(size: Size, choice: str, world: World) -> str:
    try:
        step = our_step(cell_of(size, *NEEDS.get(choice, ()), choice, images=16), world)
        for _ in range(2):
            loss = step()
    except (Exception, SystemExit) as error:  # every technique has its line
        return reason_of(error)
    return "pass" if bool(torch.isfinite(loss)) else "the loss is not finite"


def _causal_kernel(size: Size) -> dict[str, str]:
    """Compare the masked kernel of rings with the plain one, for square and cut blocks."""
    results = {}
    half = torch.bfloat16
    for queries, keys in ((128, 128), (25, 25), (7, 7)):
        torch.manual_seed(0)
        q = torch.randn(2, 4, queries, 64, device=size.device, dtype=half)
        k, v = (torch.randn(2, 4, keys, 64, device=size.device, dtype=half) for _ in range(2))
        try:
            out, lse = block_attention(q, scores_in_memory=False).forward(q, k, v, True)
            wanted, wanted_lse = Plain().forward(q, k, v, True)
            apart = max(float((out - wanted).abs().max()), float((lse - wanted_lse).abs().max()))
            results[f"{queries}x{keys}"] = "pass" if apart < 0.05 else f"differs by {apart:.2g}"
        except Exception as error:  # what the device cannot do is the result
            results[f"{queries}x{keys}"] = reason_of(error)
    return results


def beside_peers(size: Size, deadline: float, write: Write) -> None:
    """ViT-L/16 in bfloat16 beside timm, torchvision and transformers, eager and compiled."""
    size = replace(size, extra=())  # the shape that the others have
    rates = calibrate(world_of(size, group=False))
    images = _largest_batch(size)
    found, absent = peers.available()
    others = [name for name in found if not name.startswith("vitsweep") and "eager" not in name]
    contenders = [
        ours(f"vitsweep {name}", size, *BASE, f"compilation={name}", images=images) for name in OURS
    ]
    tflop = contenders[0].model_tflop
    for name in others:
        contenders += [
            theirs(name, size, images, compiled=False, model_tflop=tflop),
            theirs(f"{name} compiled", size, images, compiled=True, model_tflop=tflop),
        ]
    contenders.sort(key=lambda c: "compile" in c.name)  # compiling takes long: last
    _measured(contenders, size, 3, deadline, write, rates | {"absent peers": absent})


def one_at_a_time(size: Size, deadline: float, write: Write) -> None:
    """Each technique alone over one rank, bfloat16 and fused AdamW; the blog's baseline under TF32."""
    rates = calibrate(world_of(size, group=False))
    small, large = (4, 8) if size.seconds == 0 else (32, _largest_batch(size))
    images = max(16, large // 16 * 16)  # FP8 wants multiples of 16
    contenders = [
        ours(" ".join(choice) or "base", size, *BASE, *choice, images=images)
        for choice in SINGLE_CHOICES
    ]
    contenders += [
        ours(f"optimizer=adamw_{each} at {small} images", size, BASE[0], f"optimizer=adamw_{each}",
             images=small)
        for each in UPDATES
    ]  # fmt: skip
    contenders.append(ours(BLOG_NAME, size, *BLOG, images=images))
    contenders.sort(key=lambda c: "compil" in c.name)  # compiling takes long: last
    _measured(contenders, size, 2, deadline, write, rates)


def attention(size: Size, deadline: float, write: Write) -> None:
    """Kernels at 197 to 64K tokens, forward and backward, 16 heads of width 64."""
    lengths = (17, 64) if size.seconds == 0 else LENGTHS
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        for name in KERNELS:
            if time.monotonic() > deadline:
                rows.append({"tokens": tokens, "kernel": name, "reason": "no time was left"})
                continue
            rows.append({"tokens": tokens, "kernel": name} | _kernel(size, name, tokens))
            write({"rows": rows})
    write({"rows": rows})


def _kernel(size: Size, name: str, tokens: int) -> dict[str, Any]:
    batch = 1 if size.seconds == 0 else max(1, 2**16 // tokens // 16)
    shape = (batch, 16, tokens, 64)
    try:
        cell = cell_of(size, f"attention={name}", "precision=bf16", images=16)
        model = torch.nn.Module()
        from vitsweep.model.attention import Attention

        model.attention = Attention(1024, 16, batch_first=True)
        attend = cell.attention.apply(model).attention.attend
        q, k, v = (
            torch.randn(shape, device=size.device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.randn_like(q)

        def work() -> None:
            torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

        work()
        seconds = gpu_steps.seconds_of(work, Size(size.device, seconds=min(0.3, size.seconds)))
        flop = 3.5 * 4 * batch * 16 * tokens * tokens * 64  # forward 2 products, backward 5
        return {"batch": batch, "ms": seconds * 1e3, "tflops": flop / seconds / 1e12}
    except (Exception, SystemExit) as error:  # a kernel that a length or device lacks has its line
        return {"batch": batch, "reason": reason_of(error)}
    finally:
        gpu_steps.release(size)


KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("matmul", ("gemm", "cutlass", "cublas", "nvjet", "mm", "linear", "conv")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "optim")),
    ("norm", ("layer_norm", "layernorm")),
    ("copies and casts", ("copy", "cast", "memcpy", "to_copy", "direct_copy")),
)
"""Kind of a kernel -> parts of its name, the first that fits counts."""


def profile(size: Size, deadline: float, write: Write) -> None:
    """Where a step's time goes: kinds of kernels, and the time in which none runs."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    images = 8 if size.seconds == 0 else _largest_batch(size)
    results: dict[str, Any] = {}
    for name, choice in PROFILED.items():
        if time.monotonic() > deadline:
            results[name] = {"reason": "no time was left"}
            write({"images": images, "cells": results})
            continue
        step = our_step(cell_of(size, *BASE, *choice, images=images))
        for _ in range(gpu_steps.WARM_UP_STEPS):
            step()
        on_gpu = size.device == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profiled(activities=activities) as found:
            for _ in range(gpu_steps.WARM_UP_STEPS):
                step()
            if on_gpu:
                torch.cuda.synchronize()
        results[name] = _shares(found, on_gpu=on_gpu)
        write({"images": images, "steps": gpu_steps.WARM_UP_STEPS, "cells": results})
        del step
        gpu_steps.release(size)


def _shares(found: Any, *, on_gpu: bool) -> dict[str, Any]:
    """Return milliseconds by kind; on a GPU also the share of time between kernels."""
    from torch.autograd import DeviceType

    kernels = [e for e in found.events() if (e.device_type == DeviceType.CUDA) is on_gpu]
    if not on_gpu:
        kernels = [e for e in kernels if e.cpu_parent is None]
    spent: dict[str, float] = {}
    for event in kernels:
        name = event.name.lower()
        kind = next((k for k, parts in KINDS if any(p in name for p in parts)), "other")
        spent[kind] = spent.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3
    busy, end, begin = 0.0, float("-inf"), min(e.time_range.start for e in kernels)
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        busy += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    gaps = 1 - busy / (end - begin)
    return {"ms by kind": spent, "share of time between kernels": gaps if on_gpu else None}


def _largest_batch(size: Size) -> int:
    """Return the largest of some batches that every contender of the peers' part can train."""
    if size.seconds == 0:
        return 8
    for images in (256, 192, 128, 96, 64, 32, 16):
        try:
            our_step(cell_of(size, *BASE, images=images))()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            continue
        finally:
            gpu_steps.release(size)
        return images * 3 // 4 // 16 * 16 or 16  # peers need more, and all stay on the device
    return 16


def _measured(
    contenders: list[Contender],
    size: Size,
    turns: int,
    deadline: float,
    write: Write,
    rates: dict[str, Any],
) -> None:
    sustained = rates.get("bfloat16")

    def finished() -> None:
        write({"rates": rates, "rows": [c.row(sustained) for c in contenders]})

    time_in_turns(contenders, size, turns, deadline, finished)
    finished()


PARTS: dict[str, Callable[[Size, float, Write], None]] = {
    "smoke": smoke,
    "peers": beside_peers,
    "one_at_a_time": one_at_a_time,
    "attention": attention,
    "profile": profile,
    "prediction": prediction,
}


def run(part: str, seconds: float, out: Path, *, small: bool, device: str) -> None:
    """Run one part within its seconds; `<part>.json` holds what there is at any moment."""
    size, path = (SMOKE if small else Size(device)), out / f"{part}.json"

    def write(figures: dict[str, Any]) -> None:
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(figures, indent=1) + "\n")
        draft.replace(path)

    PARTS[part](size, time.monotonic() + seconds, write)
