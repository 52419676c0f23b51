"""Muon makes the steps of a loop that is written down here, on any number of ranks."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.cells import TINY, entry
from tests.equivalence import differences
from tests.ranks import World, on_ranks, placed
from tests.training.alone import alone, batch, trainer_of, weights
from vitsweep.collectives.owners import OwnedMatrices, owners_by_cost
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.optimizer_definitions import ByEquations
from vitsweep.proof.prove import prove
from vitsweep.proof.twin import my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.optimizer import muon_with_adamw
from vitsweep.techniques.optimizer.muon_with_adamw import COEFFICIENTS, _Matrix, orthogonalized
from vitsweep.training.shards import whole_tensors
from vitsweep.training.update import names_in_blocks

RATE, DECAY, MOMENTUM = 0.02, 0.05, 0.95
MUON = ("optimizer=muon", f"optimizer.learning_rate={RATE}")


def orthogonalized_slowly(matrix: Tensor) -> Tensor:
    """Newton-Schulz as Keller Jordan's zeropower_via_newtonschulz5, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def test_state_that_is_loaded_is_that_of_both_optimizers() -> None:
    """A loop that resumes sets rates of `param_groups`, and goes on as one that was not stopped."""
    whole, resumed = (trainer_of(alone(*MUON)) for _ in range(2))
    for trainer in (whole, resumed):
        trainer.step(iter([batch()]))
    resumed.optimizer.load_state_dict(resumed.optimizer.state_dict())
    for trainer in (whole, resumed):
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 2
        trainer.step(iter([batch()]))
    for name, weight in weights(whole).items():
        assert torch.equal(weights(resumed)[name], weight), name


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
            update = orthogonalized_slowly((1 - MOMENTUM) * g + MOMENTUM * after)
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
        F.cross_entropy(model(images), labels).backward()
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


def test_tensor_parallelism_is_refused_by_name() -> None:
    (reason,) = entry(*TINY, "optimizer=muon", "tensor_parallel=megatron").reasons
    assert "which `mesh.tensor=2` splits over ranks" in reason


def test_batched_iterations_are_torchs_to_the_bit() -> None:
    torch.manual_seed(0)
    for shape, count in (((192, 192), 3), ((256, 64), 2), ((64, 256), 2), ((48, 32), 1)):
        matrices = [torch.randn(shape).bfloat16() for _ in range(count)]
        for found, matrix in zip(orthogonalized(matrices, 5), matrices, strict=True):
            assert torch.equal(found, _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


def by_equations(spec: CellSpec, steps: int) -> dict[str, Tensor]:
    """The weights after so many steps on whole batches, by equations in float64."""
    torch.manual_seed(spec.seed)
    model = build_model(spec).double()
    update = ByEquations(spec.optimizer, torch.float64, in_blocks=names_in_blocks(model))
    named = dict(model.named_parameters())
    limit = spec.optimizer.clip_norm
    for step in range(steps):
        images, labels = batch(step, IMAGES)
        model.zero_grad()
        F.cross_entropy(model(images.double()), labels).backward()
        if limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        weights = {n: p.detach().clone() for n, p in named.items()}
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        for name, value in update(weights, gradients).items():
            named[name].data.copy_(value)
    return {name: p.detach() for name, p in named.items()}


def trained(world: World, cells: list[CellSpec], steps: int) -> list[dict[str, Tensor]]:
    """The whole weights of each cell after so many steps on this rank's parts of the batches."""
    found = []
    for spec in cells:
        here = placed(world, spec)
        torch.manual_seed(spec.seed)
        trainer = parallelize(build_model(spec), spec, here)
        for step in range(steps):
            trainer.step(iter(my_share(spec, batch(step, IMAGES), here)))
        found.append(
            {n: w.detach().clone() for n, w in whole_tensors(trainer, lambda p: p).items()}
        )
    return found


IMAGES = 24
UNEVEN = ("model.width=36", "model.num_heads=3", "model.mlp_width=70")
"""Rows that neither 2 nor 4 ranks divide."""


@pytest.mark.parametrize(
    "ranks",
    [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)],
)
def test_sharded_updates_are_those_of_whole_matrices(ranks: int, tmp_path: Path) -> None:
    """In float64, in which the iterations hide nothing; with fewer matrices than ranks too."""
    shardings = ["ddp", "zero1", "zero2", "fsdp"] if ranks > 1 else ["none", "zero1", "fsdp"]
    shardings += ["hsdp"] * (ranks == 4)
    place = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1")
    float64 = (
        f"batch.images_per_step={IMAGES}",
        "precision.dtype=float64",
        "optimizer=muon",
        "optimizer.learning_rate=0.003",
    )
    accumulating = ("batch.accumulation_steps=2", "optimizer.clip_norm=0.5")
    cells = [
        entry(*TINY, *place, *float64, f"sharding={sharding}", *model, *more).spec
        for model, more in ((UNEVEN, ()), (("model.depth=1",), accumulating))
        for sharding in shardings
    ]
    wanted = {spec.model: by_equations(spec, 3) for spec in cells}
    for spec, found in zip(
        cells, on_ranks(ranks, trained, cells[0], cells, 3, folder=tmp_path)[0], strict=True
    ):
        for name, value in wanted[spec.model].items():
            if not name.endswith(
                "qkv.bias"
            ):  # that of k has no gradient: AdamW takes rounding's sign
                apart = float((found[name] - value).norm() / value.norm())
                assert apart < 1e-12, (spec.sharding.name, name, apart)


def test_matrices_are_dealt_out_evenly() -> None:
    """Of ViT-B and ViT-Ti, by FLOPs; the busiest rank has at most 1.2 times the mean."""
    for width, ranks in ((768, 5), (192, 7)):
        square, tall = (width, width), (4 * width, width)
        shapes = [*[square] * 4, tall, tall[::-1]] * 12
        costs = [_Matrix("", 0, 1, shape, None, 0).flops for shape in shapes]
        load = [0.0] * ranks
        for cost, owner in zip(costs, owners_by_cost(costs, ranks), strict=True):
            load[owner] += cost
        assert max(load) <= 1.2 * sum(load) / ranks


def first_matrix_of_an_owner_left_out(right: Any, owned: Any, held: Any) -> Any:
    found = right(owned, held)
    found[0].zero_()
    return found


def pieces_of_two_ranks_exchanged(right: Any, owned: Any, sent: Any, here: Any, there: Any) -> Any:
    first, second = right(owned, sent, here, there).split(there)
    return torch.cat([second, first])


def proofs(world: World, specs: list[CellSpec]) -> list[list[str]]:
    """What the proof says of each cell without a fault, and with each of three; of the second with one."""

    def verdict(spec: CellSpec) -> str:
        try:
            return f"equal {prove(spec, placed(world, spec)):.0e}"
        except WrongResultError as error:
            return str(error)

    faults: list[tuple[Any, str, Any]] = [
        (muon_with_adamw, "FUSED_QKV", ()),
        *(
            (OwnedMatrices, name, partialmethod(wrong, getattr(OwnedMatrices, name)))
            for name, wrong in (
                (
                    "gather",
                    lambda me, right, *rest: first_matrix_of_an_owner_left_out(right, me, *rest),
                ),
                (
                    "_exchange",
                    lambda me, right, *rest: pieces_of_two_ranks_exchanged(right, me, *rest),
                ),
            )
        ),
    ]
    found = []
    for spec in specs:
        told = [verdict(spec)]
        for place, name, wrong in faults if spec is specs[0] else faults[-1:]:
            right = getattr(place, name)
            setattr(place, name, wrong)
            told.append(verdict(spec))
            setattr(place, name, right)
        found.append(told)
    return found


def test_the_proof_passes_sharded_muon_and_finds_what_is_planted(tmp_path: Path) -> None:
    place = ("resources.ranks_per_node=2", "resources.threads_per_rank=1", "optimizer=muon")
    specs = [
        entry(*TINY, *place, *more).spec
        for more in (("sharding=fsdp",), ("sharding=zero1", "precision=O2"))
    ]
    for answers in on_ranks(2, proofs, specs[0], specs, folder=tmp_path):
        assert all(honest.startswith("equal") for honest, *_ in answers)
        (_, of_matrices, *of_exchange), (_, last) = answers
        assert "`optimizer=muon`" in of_matrices
        # which nothing but the sharding and the optimizer touch: without either the twin agrees
        named = [
            "`sharding=" in told or "`optimizer=muon`" in told for told in (*of_exchange, last)
        ]
        assert named == [True] * 3
