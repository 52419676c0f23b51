"""Muon makes the steps of a loop that is written down here, on any number of ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cells import TINY, entry
from tests.equivalence import differences
from tests.ranks import on_ranks
from tests.training.alone import alone, batch, trainer_of, weights
from vitsweep.model.build import build_model
from vitsweep.training.trainer import criterion_of

RATE, DECAY, MOMENTUM = 0.02, 0.05, 0.95
MUON = ("optimizer=muon", f"optimizer.learning_rate={RATE}")


def orthogonalized(matrix: Tensor) -> Tensor:
    """Newton-Schulz as Keller Jordan's zeropower_via_newtonschulz5, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class SlowMuon:
    """Muon with Nesterov momentum and decoupled weight decay, matrix by matrix."""

    def __init__(self) -> None:
        self.velocity: dict[str, Tensor] = {}

    def step(self, name: str, weight: Tensor) -> None:
        parts = 3 if name.endswith("qkv.weight") else 1
        for i, (w, g) in enumerate(
            zip(weight.chunk(parts), weight.grad.chunk(parts), strict=True)  # type: ignore[union-attr]
        ):
            before = self.velocity.get(f"{name}{i}", torch.zeros_like(g))
            after = self.velocity[f"{name}{i}"] = MOMENTUM * before + (1 - MOMENTUM) * g
            update = orthogonalized((1 - MOMENTUM) * g + MOMENTUM * after)
            w.mul_(1 - RATE * DECAY).sub_(0.2 * max(w.shape) ** 0.5 * RATE * update.to(w.dtype))


def test_matrices_of_blocks_make_the_steps_of_the_loop_and_the_rest_those_of_adamw() -> None:
    spec = alone(*MUON)
    trainer = trainer_of(spec)
    torch.manual_seed(spec.seed)
    model, slow = build_model(spec), SlowMuon()
    named = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    matrices = {n for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2}
    assert len(matrices) == 4 * spec.model.depth
    kinds = {
        decay: [p for n, p in named.items() if n not in matrices and (n in DECAYING) is decay]
        for decay in (True, False)
    }
    adamw = torch.optim.AdamW(
        [{"params": kinds[decay], "weight_decay": DECAY * decay} for decay in (True, False)],
        lr=RATE,
    )
    for step in range(2):
        images, labels = batch(step)
        trainer.step(iter([(images, labels)]))
        model.zero_grad()
        criterion_of(spec)(model(images), labels).backward()
        with torch.no_grad():
            for name in matrices:
                slow.step(name, named[name])
        adamw.step()
    for name, value in weights(trainer).items():
        wanted, moved = named[name].detach(), (named[name] - start[name]).detach().norm()
        if not name.endswith("qkv.bias"):  # that of k has no gradient: AdamW takes rounding's sign
            assert float((value - wanted).norm() / moved) < (0.1 if name in matrices else 0.01), (
                name
            )


DECAYING = {"embedding.patch.weight", "head.weight"}
"""Matrices outside the blocks."""


@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_replicas_train_as_one_process(ranks: int, tmp_path: Path) -> None:
    """Newton-Schulz rounds to bfloat16: sums in another order show in the loss after a few digits."""
    place = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1", "sharding=ddp")
    chosen = ("optimizer=muon", "optimizer.learning_rate=0.003", "optimizer.clip_norm=0.5")
    cells = [
        entry(*TINY, *place, *chosen, *more).spec
        for more in ((), ("precision=O2", "batch.accumulation_steps=2"), ("precision=bf16",))
    ]
    for answer in on_ranks(ranks, differences, cells[0], cells, folder=tmp_path)[0]:
        assert answer["moved"] > 1e-2
        assert answer["loss"] < 5e-3


def test_what_splits_matrices_is_refused_by_name() -> None:
    for choice, part in {
        "sharding=fsdp": "of which `sharding=fsdp` lets a rank update a slice: use `sharding=ddp`",
        "sharding=zero1": "of which `sharding=zero1` lets a rank update a slice: use `sharding=ddp`",
        "tensor_parallel=megatron": "which `mesh.tensor=2` splits over ranks",
    }.items():
        (reason,) = entry(*TINY, "optimizer=muon", choice).reasons
        assert part in reason
