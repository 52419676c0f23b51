"""The first part of `gpu.py`: what runs at all, and whether causal rings compute what they should."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_list import RING_KERNELS, smoke_cases
from gpu_steps import ENDED, NO_TIME, SMOKE, Run, Size, cell_of, end_if_lost, our_step, reason_of
from torch import Tensor

from vitsweep.spec.resources import MeshShape
from vitsweep.techniques.sequence_parallel.ring_attention import (
    BlockAttention,
    Parts,
    _merge,
    block_attention,
)
from vitsweep.world import World, device_mesh

TOKENS = 196
MOST_ROUNDING = 0.02
"""Relative L2 distance from float32 that bfloat16's rounding explains; a wrong mask is beyond 0.1."""
Projections = tuple[Tensor, Tensor, Tensor]


def smoke(run: Run) -> None:
    """Compare the causal kernel of rings with plain attention; take some steps of every technique."""
    kernels, steps = (dict(run.earlier.get(name, {})) for name in ("causal kernel", "steps"))
    done = {"causal kernel": kernels, "steps": steps}
    for name, (ranks, per_rank) in RING_KERNELS.items():
        if name not in kernels:
            kernels[name] = ENDED
            run.write(done)
            kernels[name] = _ring_result(run.size.device, ranks, per_rank)
            run.write(done)
            end_if_lost(run.size)
    world = world_with_groups(run.size.device)
    small = Size(run.size.device, "vit_tiny", SMOKE.resolution_px, ("model.depth=2",))
    for case in smoke_cases():
        name = " ".join(case)
        if name in steps:
            continue
        if run.is_late:
            steps[name] = NO_TIME
            continue
        steps[name] = ENDED
        run.write(done)
        steps[name] = _some_steps(small, case, world)
        run.write(done)
        end_if_lost(run.size)
    run.write(done)
    dist.destroy_process_group()


def world_with_groups(device: str) -> World:
    """Return the world of one rank with process groups, which some techniques need."""
    shape = MeshShape(pipeline=1, replicate=1, shard=1, sequence=1, ring=1, ulysses=1, tensor=1)
    store = Path(tempfile.mkdtemp()) / "rendezvous"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=0,
        world_size=1,
    )
    mesh = device_mesh(device, shape)
    return World(rank=0, local_rank=0, size=1, device=torch.device(device), shape=shape, mesh=mesh)


def _some_steps(size: Size, case: tuple[str, ...], world: World) -> str:
    try:
        cell = cell_of(size, *case, images=16)
        step = our_step(cell, world)
        for _ in range(2):  # the second step has an optimizer state
            loss = step()
        return "pass" if bool(torch.isfinite(loss)) else "the loss is not finite"
    except (Exception, SystemExit) as error:  # every technique has its line
        return reason_of(error)


def _ring_result(device: str, ranks: int, per_rank: int) -> str:
    try:
        apart = ring_differences(device, ranks, per_rank)
    except Exception as error:  # what the device cannot do is the result
        return reason_of(error)
    wrong = {name: far for name, far in apart.items() if not far <= MOST_ROUNDING}
    return f"differs from plain attention: {wrong}" if wrong else "pass"


def ring_differences(
    device: str, ranks: int, per_rank: int, kernel: BlockAttention | None = None
) -> dict[str, float]:
    """Compute causal attention as all ranks of a ring would, blocks with padding included, in bfloat16.

    Args:
        device: where.
        ranks: of the ring.
        per_rank: parts of the sequence that each rank holds; 2 for zigzag order.
        kernel: another one than the ring takes.

    Returns:
        Relative L2 distance of output and gradients (`out`, `dq`, `dk`, `dv`) from attention in float32.
    """
    torch.manual_seed(0)
    parts = Parts(TOKENS, ranks, per_rank, causal=True)
    padded = -(-TOKENS // (ranks * per_rank)) * ranks * per_rank
    q, k, v, gradient = (
        torch.randn(2, 4, TOKENS, 64, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*exact, is_causal=True)
    derivatives = torch.autograd.grad(wanted, exact, gradient.float())
    kernel = kernel or block_attention(q)
    found = _round_ring(parts, padded, (q, k, v), gradient, kernel)
    return {
        name: float((a - b).norm() / b.norm())
        for name, a, b in zip(
            ("out", "dq", "dk", "dv"), found, (wanted.detach(), *derivatives), strict=True
        )
    }


def _round_ring(
    parts: Parts, padded: int, qkv: Projections, gradient: Tensor, kernel: BlockAttention
) -> list[Tensor]:
    """Return output and gradients of all tokens, every rank's blocks computed here one by one."""
    q, k, v, gradient = (F.pad(t, (0, 0, 0, padded - parts.num_tokens)) for t in (*qkv, gradient))
    local, part = padded // parts.ranks, padded // parts.ranks // parts.per_rank
    out, dq, dk, dv = (torch.zeros_like(q, dtype=torch.float32) for _ in range(4))
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)

    def block(rank: int, within: slice) -> slice:
        """Where a slice of a rank's tokens lies in the sequence: no slice crosses two parts."""
        which, offset = divmod(within.start, part)
        start = parts.of(rank)[which] * part + offset
        return slice(start, start + within.stop - within.start)

    pairs = [
        (block(here, queries), block(source, keys), masked)
        for here in range(parts.ranks)
        for source in range(parts.ranks)
        for queries, keys, masked in parts.pairs(local, here, source)
    ]
    for a, b, masked in pairs:
        _merge(
            out[:, :, a], lse[:, :, a], *kernel.forward(q[:, :, a], k[:, :, b], v[:, :, b], masked)
        )
    half = out.to(q.dtype)
    for a, b, masked in pairs:
        saved = (
            *(q[:, :, a], k[:, :, b], v[:, :, b]),
            *(t[:, :, a].contiguous() for t in (half, lse)),
        )
        of_q, of_k, of_v = kernel.backward(gradient[:, :, a].contiguous(), saved, masked)
        dq[:, :, a] += of_q
        dk[:, :, b] += of_k
        dv[:, :, b] += of_v
    return [t[:, :, : parts.num_tokens] for t in (out, dq, dk, dv)]
