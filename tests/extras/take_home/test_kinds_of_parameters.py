"""Complex, transposed, tied, float64, scalar and reparametrized parameters: as plain PyTorch, or refused."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import vitsweep
from tests import user_modules
from tests.cells import entry
from tests.ranks import on_ranks
from tests.refusals import require
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

KINDS = ("with_complex_filters", "with_transposed_weights", "with_ties", "with_ties_in_one_unit",
         "with_gains_in_float64", "with_weight_norm", "with_weight_norm_of_hooks", "with_spectral_norm",
         "with_spectral_norm_of_hooks")  # fmt: skip
EXACT = "precision=fp32 precision.dtype=float64"
PRECISIONS = (EXACT, "precision=fp32", "precision=O1", "precision=O2", "precision=O3",
              "precision=bf16_masters", "precision=O2 precision.half_dtype=float16")  # fmt: skip
SGD, RATE, LIMIT = "optimizer.momentum=0.9 optimizer.nesterov=false", 0.1, 0.5
OPTIMIZERS = (f"optimizer=sgd_foreach {SGD}", "optimizer=adamw_fused optimizer.eps=0.01",
              f"optimizer=sgd_contiguous {SGD}")  # fmt: skip
SHARDINGS = ("sharding=ddp", "sharding=zero1", "sharding=fsdp")
REFUSED = {
    ("with_complex_filters", "fsdp"), ("with_complex_filters", "adamw_fused"),
    ("with_complex_filters", "float16"), ("with_transposed_weights", "fsdp"),
    ("with_ties", "fsdp"), ("with_ties_in_one_unit", "O2"), ("with_gains_in_float64", "fsdp"),
    ("sgd_contiguous", "fsdp"), ("sgd_contiguous", "zero1"),
}  # fmt: skip
"""Of which pairs of words a case is refused; FSDP splits no scalars."""
STEPS, IMAGES = 3, 8


def cells(ranks: int, *choices: Sequence[str]) -> list[CellSpec]:
    """Return the product of choices; the model is given to `apply`."""
    typed = map(" ".join, product(*choices))
    size = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1", "model=module",
            f"optimizer.clip_norm={LIMIT}", f"optimizer.learning_rate={RATE}",
            "model.target=tests.user_modules.build", "optimizer.weight_decay=0.01")  # fmt: skip
    return [entry(*words.split(), *size).spec for words in typed]


def batches(ranks: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    size = IMAGES * ranks
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(STEPS)
    ]  # fmt: skip


def model_of(kind: str, *, wide: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(user_modules, kind)()
    return model._apply(_widened) if wide else model


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def trained_plainly(kind: str, optimizer: str, ranks: int) -> dict[str, Tensor]:
    """Train in float64, without any technique, on the batches of all ranks together."""
    model = model_of(kind, wide=True)
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim > 1 and name.endswith("weight") else others).append(parameter)
    groups: Any = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0}]
    own: torch.optim.Optimizer
    if optimizer.startswith("sgd"):
        own = torch.optim.SGD(groups, RATE, momentum=0.9, foreach=False)
    else:
        own = torch.optim.AdamW(groups, RATE, eps=0.01, foreach=False)
    for images, labels in batches(ranks):
        own.zero_grad()
        cross_entropy(model(images.double()), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        own.step()
    return model.state_dict()


def faults(world: World, cells: list[CellSpec], kinds: tuple[str, ...]) -> list[str]:
    """Return in words what is neither as plain training nor refused where it must be."""
    found, plain = [], {}
    for cell in cells:
        for kind in kinds:
            words = {kind, cell.sharding.name, cell.optimizer.name, cell.precision.name}
            words.add(getattr(cell.precision, "half_dtype", ""))
            is_refused = any({*pair} <= words for pair in REFUSED)
            try:
                weights = trained(world, cell, kind)
            except vitsweep.ImpossibleCellError as error:
                require("\n".join(error.reasons))
                found += [] if is_refused else [f"{sorted(words)}: {error}"]
                continue
            key = kind, cell.optimizer.name
            if key not in plain:
                plain[key] = trained_plainly(*key, world.size)
            apart = [] if is_refused else _apart(cell, kind, weights, plain[key])
            found += [
                f"{sorted(words)}: {text or 'trained'}" for text in apart or [""] * is_refused
            ]
    return found


def trained(world: World, cell: CellSpec, kind: str) -> dict[str, Tensor]:
    own = slice(world.rank * IMAGES, (world.rank + 1) * IMAGES)
    with vitsweep.apply(cell, model_of(kind)) as applied:
        for images, labels in batches(world.size):
            applied.step((images[own], labels[own]))
        return applied.weights()


def _apart(cell: CellSpec, kind: str, found: Any, wanted: dict[str, Tensor]) -> list[str]:
    """Name tensors off by more than rounding: 1e-10 in float64, of weights in half their last digits too."""
    first, plan = model_of(kind, wide=True).state_dict(), cell.precision.plan()
    bounds = {"float64": (1e-10, 0.0), "float32": (1e-4, 1e-6)}
    share, digits = bounds.get(plan.autocast_dtype or plan.param_dtype, (0.3, 2.0**-6))
    if getattr(cell.sharding, "gradient_dtype", None):
        share, digits = 0.05, 0.0
    told = []
    for name, weight in wanted.items():
        off = float((_widened(found[name]) - weight).norm())
        moved = float((weight - first[name]).norm())
        if weight.is_complex() != found[
            name
        ].is_complex() or not off <= share * moved + digits * float(weight.norm()):
            told.append(f"`{name}` {off:.2g} off, moved {moved:.2g}")
    return told


def test_kinds_of_parameters_train_as_in_plain_pytorch_or_are_refused(tmp_path: Path) -> None:
    own = cells(1, (EXACT, "precision=O2"), OPTIMIZERS, ("sharding=ddp",))
    for found in on_ranks(1, faults, own[0], own, KINDS, folder=tmp_path):
        assert not found


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_they_do_in_every_precision_and_sharding(ranks: int, tmp_path: Path) -> None:
    own = cells(ranks, PRECISIONS, OPTIMIZERS, SHARDINGS)
    for found in on_ranks(ranks, faults, own[0], own, KINDS, folder=tmp_path, seconds=900):
        assert not found


@pytest.mark.full
def test_complex_gradients_are_whole_where_others_are_exchanged_in_half(tmp_path: Path) -> None:
    shardings = [f"{name} sharding.gradient_dtype=bfloat16" for name in SHARDINGS[:2]]
    own = cells(2, ("precision=fp32",), OPTIMIZERS[:1], shardings)
    for found in on_ranks(2, faults, own[0], own, KINDS[:1], folder=tmp_path):
        assert not found
