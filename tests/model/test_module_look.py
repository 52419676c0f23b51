"""What a look at a user's module shows, and that techniques do with it what plain PyTorch does."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cells import entry
from tests.data.cells_and_worlds import world as lone_world
from tests.ranks import on_ranks, placed
from vitsweep.model.block import mark_blocks
from vitsweep.model.build import first_model
from vitsweep.model.initialize import Draws
from vitsweep.model.module_look import (
    as_it_was,
    differentiable,
    inputs_of,
    is_writable,
    listed,
    logits_of,
    look_at,
    set_to_train,
    shapeless,
)
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.proof.prove import prove
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

BASE = ("model=module", "batch.images_per_step=16", "resources.threads_per_rank=1")
UNPROVED = "measurement.prove=none"
ONE, TWO = ("resources.ranks_per_node=1", "sharding=none"), ("resources.ranks_per_node=2",)


def planned(target: str, *overrides: str) -> PlannedCell:
    return entry(*BASE, f"model.target=tests.user_modules.{target}", *overrides)


def trained(cell: Any, steps: int = 2) -> Trainer:
    trainer = parallelize(first_model(cell), cell, lone_world())
    images = torch.randn((16, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        trainer.step(iter([(images, torch.arange(16) % 10)]))
    return trainer


@pytest.mark.parametrize(
    "technique",
    [
        ("memory=recompute_blocks",),
        ("memory=recompute_selected",),
        pytest.param(("memory=recompute_blocks", "compilation=compile_blocks"), marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_running_statistics_move_once_where_blocks_are_recomputed(
    technique: tuple[str, ...],
) -> None:
    plain, recomputed = (
        trained(planned("with_batch_norm", *ONE, *choices).spec) for choices in ((), technique)
    )
    found = dict(recomputed.model.named_buffers())
    for name, wanted in plain.model.named_buffers():
        other = found[name] if name in found else found[f"_orig_mod.{name}"]
        assert torch.allclose(other.double(), wanted.double(), 0.02, 2e-3), name


def test_what_techniques_cannot_do_with_a_module_is_reported_by_name() -> None:
    for target, overrides, words in [
        ("with_written_buffer", ("memory=recompute_blocks",), "`layers.0.calls`, `layers.1.calls`"),
        ("with_written_buffer_off_meta", ("memory=recompute_blocks",), "`layers.0.calls`"),
        ("with_a_scale", ("sharding=fsdp",), "has `scale`: use `sharding=zero1`"),
        ("with_a_complex_parameter", ("sharding=fsdp",), "has `phase`: use `sharding=zero1`"),
        ("with_complex_filters", ("optimizer=adamw_fused",), "use `optimizer=adamw_foreach`"),
        ("with_complex_filters", ("optimizer=muon",), "use `optimizer=adamw_foreach`"),
        (
            "with_complex_filters",
            ("precision=O2", "precision.half_dtype=float16"),
            "`layers.0.filter`, `layers.0.mixing_weight`",
        ),
        (
            "with_transposed_weights",
            ("sharding=zero2",),
            "`layers.1.module.weight`: call `contiguous",
        ),
        ("with_ties_in_one_unit", ("precision=O2",), "`layers.0.norm.bias`"),
        ("with_names_alike", (), "`layers.0.weight`, `layers.0.module.weight`"),
        (
            "build",
            (
                "objective=module",
                "objective.target=tests.user_modules.number",
            ),
            "returned float ",
        ),
        (
            "with_ties",
            ("sharding=fsdp", "resources.ranks_per_node=2"),
            "`layers.0.module.weight`, `layers.1.module.weight`",
        ),
        ("without_blocks", ("optimizer=muon",), "has none at `model.blocks=auto`"),
        ("with_dropout", (), "draws random numbers in training, in `layers.0.1`, `layers.1.1`"),
        ("with_dropout", (), "(by `dropout`), and so does its twin"),
        ("with_dropout", (), "training: turn dropout off in `model.twin_arguments`, or use"),
        ("Hides", (), "in `Hides` (by `rand_like`), and so does its twin"),
        (
            "Hides",
            (),
            "training: draw them in the items of the data set, or use `measurement.prove",
        ),
        ("with_functional_dropout", (), "off in `model.twin_arguments`, draw them in the items"),
        ("with_a_centre", (), "`layers.1.center` from its images"),
        (
            "with_a_centre",
            ("++model.arguments.kind=replaced", "sharding=fsdp"),
            "`layers.1.center`",
        ),
        (
            "with_written_weights",
            (),
            "writes its own weights in the forward pass, `layers.0.module.weight`",
        ),
        (
            "with_written_weights",
            (UNPROVED, "sharding=fsdp"),
            "`sharding=fsdp` updates tensors of its own",
        ),
        (
            "with_written_weights",
            (UNPROVED, "precision=O2"),
            "`precision=O2` updates tensors of its own",
        ),
        (
            "with_written_weights",
            (UNPROVED, "memory=recompute_blocks"),
            "blocks` runs blocks twice, and",
        ),
        (
            "with_written_weights",
            (UNPROVED, "sharding=zero1"),
            "use `sharding=ddp`, or compute these by `torch.nn.utils.parametrize`.",
        ),
        ("with_lazy_linear", (), "has parameters without a shape, in `LazyLinear`: pass one batch"),
    ]:
        [reason] = planned(target, *overrides).reasons
        assert words in reason


@pytest.mark.parametrize(
    ("target", "overrides"),
    [
        ("with_written_buffer", ()),
        ("with_batch_norm", ()),
        ("with_a_read_counter", ()),
        ("with_a_centre", ("++model.arguments.kind=unread",)),
        ("with_a_centre", (UNPROVED,)),
        ("with_a_centre", ("resources.ranks_per_node=1",)),
        ("with_ties", ("sharding=zero1",)),
        ("with_ties_in_one_unit", ("sharding=fsdp",)),
        ("with_dropout", ("measurement.prove=none",)),
        ("with_dropout", ("++model.twin_arguments.rate=0",)),
        ("with_written_weights", (UNPROVED,)),
        ("with_written_weights", (UNPROVED, "++model.arguments.replaces=true")),
    ],
)
def test_what_they_can_do_is_not_refused(target: str, overrides: tuple[str, ...]) -> None:
    two = () if any("ranks_per_node" in word for word in overrides) else TWO
    assert not planned(target, *two, *overrides).reasons


def proofs(world: World, cells: list[Any]) -> list[float]:
    return [prove(cell, placed(world, cell)) for cell in cells]


def test_unused_and_tied_parameters_and_written_buffers_are_proved_on_two_ranks(
    tmp_path: Path,
) -> None:
    cells = [
        planned("with_unused_parameters", *TWO, choice).spec
        for choice in ("sharding=ddp", "sharding=zero1", "sharding=fsdp")
    ]
    cells += [
        planned("with_ties_in_one_unit", *TWO, "sharding=fsdp").spec,
        planned("with_a_read_counter", *TWO, "sharding=zero1", "batch.accumulation_steps=2").spec,
        planned("with_a_centre", *TWO, "++model.arguments.kind=unread").spec,
    ]
    assert max(on_ranks(2, proofs, cells[0], cells, folder=tmp_path)[0]) < 1e-5


class Masks(nn.Module):
    """Draws a mask of dropout and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(nn.functional.dropout(torch.ones(64), 0.5, self.training))
        return x


def masks(world: World, cell: Any, first_step: int = 0) -> list[Tensor]:
    """Train two steps on images that are the same on all ranks; return the masks of dropout."""
    model = first_model(cell)
    model.layers.append(Masks())  # type: ignore[operator, union-attr]
    seen = model.layers[-1].seen  # type: ignore[index, union-attr]
    trainer = parallelize(model, cell, world)
    trainer.steps_taken = first_step
    for _ in range(2 - first_step):
        trainer.step(iter([(torch.ones(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))]))
    return seen


def masks_and_those_of_a_resumed_training(world: World, cell: Any) -> list[Tensor]:
    torch.rand(world.rank + 3)  # what else a process draws changes nothing
    return [*masks(world, cell), *masks(world, cell, first_step=1)]


def test_dropout_differs_between_replicas_and_steps_and_is_reproducible(tmp_path: Path) -> None:
    cell = planned("with_dropout", "resources.ranks_per_node=2", "measurement.prove=none").spec
    first, again = (
        on_ranks(2, masks_and_those_of_a_resumed_training, cell, cell, folder=tmp_path)
        for _ in range(2)
    )
    for rank in range(2):
        step_0, step_1, resumed = first[rank]
        assert not torch.equal(step_0, step_1)
        assert torch.equal(step_1, resumed)
        assert all(map(torch.equal, first[rank], again[rank]))
    assert not torch.equal(first[0][0], first[1][0])


def test_ranks_that_share_an_image_draw_alike_and_the_process_goes_on_as_before() -> None:
    torch.manual_seed(3)
    before, found = torch.get_rng_state(), []
    for replica in (0, 0, 1):  # ranks of one tensor group have one replica
        with Draws(7, replica).default_generators(torch.device("cpu")):
            numbers = [random.random(), np.random.rand()]  # as a loss may draw them
            found.append(torch.cat([torch.rand(4), torch.tensor(numbers)]))
    assert torch.equal(found[0], found[1])
    assert not torch.isclose(found[0], found[2]).any()
    assert torch.equal(before, torch.get_rng_state())


def test_a_long_list_of_names_ends_after_ten() -> None:
    assert listed([str(n) for n in range(12)]).endswith("`9` and 2 more")
    assert listed([str(n) for n in range(10)]).endswith("`9`")
    assert listed([str(n) for n in range(11)]).endswith("`9` and 1 more")


def test_muon_takes_the_matrices_of_the_blocks_that_are_named() -> None:
    found = trained(planned("build", *ONE, "optimizer=muon").spec)
    wanted = ["body.layers.0.weight", "body.layers.1.weight"]  # `module` is a name of wrappers
    assert found.optimizer.matrix_names == wanted  # type: ignore[attr-defined]
    assert prove(planned("build", *ONE, "optimizer=muon").spec, lone_world()) < 1e-3


def test_logits_and_tensors_with_gradients_are_found_in_what_is_returned() -> None:
    given, plain = torch.zeros(2, requires_grad=True), torch.zeros(2)
    assert logits_of({"logits": given, "loss": plain}) is given
    assert logits_of({"scores": given}) == {"scores": given}
    assert logits_of(given) is given
    assert logits_of(["logits"]) == ["logits"]
    for outputs, count in (
        (given, 1),
        (plain, 0),
        ({"a": given, "b": plain, "c": 3}, 1),
        ((given, [given]), 2),
    ):
        assert len(differentiable(outputs)) == count


class Tied(nn.Module):
    """A weight in two blocks, one in a block and outside, one twice in a block, and one outside alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(2, 2, False)}) for _ in range(3))
        self.blocks[1]["a"].weight = self.blocks[0]["a"].weight
        self.blocks[2]["b"] = self.blocks[2]["a"]
        self.head = nn.Linear(2, 2, False)
        self.tail = self.head
        self.out = nn.Linear(2, 2, False)
        self.out.weight = self.blocks[2]["a"].weight
        mark_blocks(self.blocks)


def test_parameters_of_several_blocks_are_tied() -> None:
    found = look_at(Tied())
    assert {frozenset(names) for names in found.tied} == {
        frozenset({"blocks.0.a.weight", "blocks.1.a.weight"}),
        frozenset({"blocks.2.a.weight", "blocks.2.b.weight", "out.weight"}),
    }
    assert (found.matrices, found.outputs, found.unshardable) == (2, None, ())


class Odd(nn.Module):
    """Writes, replaces, draws and leaves out what it can."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left = nn.Linear(4, 3), nn.Linear(4, 3)
        self.number = nn.Parameter(torch.tensor(1.0))
        self.waves = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.written = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.written.data.add_(1)
        found: Tensor = self.dropout(self.used(x.flatten(1))) * self.number
        return found


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_pass_shows_what_is_written_drawn_and_left_out(device: str) -> None:
    batch = torch.zeros(2, 1, 2, 2), torch.zeros(2)
    found = look_at(Odd(), batch, device=device)
    assert found.error is None
    assert (found.draws, found.drawn_by, found.carried) == (("dropout",), ("dropout",), ())
    assert {*found.unused} == {"left.weight", "left.bias", "waves"}
    assert found.unshardable == ("number", "waves")
    assert found.rewritten == ("written",)
    assert tuple(found.outputs.shape) == (2, 3)
    assert look_at(nn.Linear(3, 2), batch, device=device).error is not None


def test_entries_that_forward_names_are_its_inputs() -> None:
    class Named(nn.Module):
        def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
            return a

    class Open(nn.Module):
        def forward(self, a: Tensor, **more: Tensor) -> Tensor:
            return a

    batch = {"a": torch.zeros(1), "c": torch.ones(1)}
    assert inputs_of(Named(), batch).keys() == {"a"}
    assert inputs_of(Open(), batch).keys() == {"a", "c"}


def test_modes_gradients_and_buffers_are_as_they_were_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    model[2].eval()
    model[0].bias.requires_grad_(False)
    mean, state = model[1].running_mean, torch.get_rng_state()
    with as_it_was(model):
        model.train()
        model(torch.randn(4, 2))
        model.eval()
        model.requires_grad_(True)
        model[1].running_mean = torch.ones(2)
        model.register_buffer("new", torch.zeros(1))
    assert [part.training for part in model.modules()] == [True, True, True, False]
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert model[1].running_mean is mean
    assert mean.tolist() == [0.0, 0.0]
    assert int(model[1].num_batches_tracked) == 0
    assert "new" not in dict(model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_that_were_expanded_cannot_be_written() -> None:
    for buffer, can_be in (
        (torch.zeros(3), True),
        (torch.zeros(1).expand(3), False),
        (torch.zeros(1, 2).expand(3, 2), False),
        (torch.zeros(1, 2).expand(1, 2), True),
        (torch.zeros(()), True),
        (torch.zeros(0), True),
    ):
        assert is_writable(buffer) is can_be


def test_parts_that_were_built_in_evaluation_stay_in_it_unless_all_were() -> None:
    some, whole = (nn.Sequential(nn.Linear(1, 1), nn.Dropout()) for _ in range(2))
    some[1].eval()
    whole.eval()
    set_to_train(some)
    set_to_train(whole)
    assert [part.training for part in some.modules()] == [True, True, False]
    assert [part.training for part in whole.modules()] == [True, True, True]


def test_lazy_parts_are_named_by_their_class() -> None:
    assert shapeless(nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(3), nn.Linear(1, 1))) == [
        "LazyLinear"
    ]
    assert shapeless(nn.Linear(1, 1)) == []
