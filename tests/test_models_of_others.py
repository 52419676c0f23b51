"""Models of others under drawn techniques: refused in a sentence, or computed as by plain PyTorch.

The check is one of its own, beside the proof: SGD steps in float64 on two ranks, with weights and
running statistics compared with a loop that knows no technique.
"""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.cells import entry
from tests.data.cells_and_worlds import world as one_rank
from tests.ranks import RankFailedError, on_ranks, placed
from tests.refusals import named
from vitsweep.errors import VitsweepError
from vitsweep.model.build import build_model, first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import plain_weights, whole_tensors
from vitsweep.world import World

RATE, STEPS, IMAGES = 0.05, 2, 16
HALF = 0.1
"""Share of what training changed by which weights of bfloat16 products may be off."""
PLAIN_TIMES = 1.5
"""Or so many times as far as plain PyTorch in the same precision is, where few images rule the statistics."""
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
STAGES = {"hidden_sizes": "[16,16,16,16]", "depths": "[1,1,2,1]"}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "vit": SMALL | {"patch_size": 8}, "deit": SMALL | {"patch_size": 8},
    "dinov2": SMALL | {"patch_size": 8}, "dinov2_with_registers": SMALL | {"patch_size": 8},
    "beit": SMALL | {"patch_size": 8, "drop_path_rate": 0}, "vit_msn": SMALL | {"patch_size": 8},
    "data2vec-vision": SMALL | {"patch_size": 8, "drop_path_rate": 0},
    "ijepa": SMALL | {"patch_size": 8},
    "swin": {"patch_size": 4, "embed_dim": 16, "depths": "[2,2]", "num_heads": "[2,2]",
             "window_size": 4, "drop_path_rate": 0},
    "swinv2": {"patch_size": 4, "embed_dim": 16, "depths": "[2,2]", "num_heads": "[2,2]",
               "window_size": 4, "drop_path_rate": 0},
    "hiera": {"patch_stride": "[4,4]", "embed_dim": 16, "depths": "[1,1]", "num_heads": "[1,2]",
              "masked_unit_size": "[2,2]", "num_query_pool": 1},
    "convnext": STAGES, "convnextv2": STAGES, "poolformer": {"hidden_sizes": "[16,16,16,16]"},
    "focalnet": {"embed_dim": 16, "depths": "[1,1]", "focal_levels": "[2,2]", "focal_windows": "[3,3]"},
    "resnet": {"embedding_size": 16, "hidden_sizes": "[16,32]", "depths": "[2,2]"},
    "regnet": {"embedding_size": 16, "hidden_sizes": "[16,32]", "depths": "[1,2]", "groups_width": 8},
    "levit": {}, "cvt": {}, "mobilenet_v2": {}, "mobilevit": {},
    "pvt": {"hidden_sizes": "[8,8,16,16]", "depths": "[2,1,1,1]", "num_attention_heads": "[1,1,2,2]",
            "image_size": 32, "hidden_dropout_prob": 0, "drop_path_rate": 0},
}  # fmt: skip
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
WINDOWS = {
    "window_size": 4,
    "embed_dim": 16,
    "depths": "[2,2]",
    "num_heads": "[2,2]",
    "drop_path_rate": 0,
}
CONVOLUTIONS = {"depths": "[1,1,2,1]", "dims": "[16,16,16,16]"}
OF_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT, "deit_tiny_distilled_patch16_224": VIT,
    "vit_small_patch14_reg4_dinov2": VIT, "vit_small_patch16_dinov3": VIT, "eva02_tiny_patch14_224": VIT,
    "vit_base_patch16_rope_224": VIT, "beit_base_patch16_224": VIT, "cait_xxs24_224": VIT,
    "vit_relpos_small_patch16_224": VIT | {"drop_path_rate": 0}, "vit_small_patch16_18x2_224": VIT,
    "xcit_nano_12_p16_224": VIT, "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS, "hiera_tiny_224": {"embed_dim": 16, "stages": "[1,1,2,1]"},
    "twins_svt_small": {"depths": "[1,1,2,1]", "embed_dims": "[16,16,32,32]", "num_heads": "[1,1,2,2]"},
    "convnext_atto": CONVOLUTIONS, "convnextv2_atto": CONVOLUTIONS, "edgenext_xx_small": CONVOLUTIONS,
    "mobilenetv3_small_050": {}, "ghostnet_050": {"drop_rate": 0}, "pit_ti_224": {},
}  # fmt: skip
OF_OTHERS = ("build", "frozen", "with_batch_norm", "with_written_buffer", "with_ties", "with_dropout",
             "with_ties_in_one_unit", "with_unused_parameters", "without_blocks", "with_complex_buffer",
             "with_custom_autograd", "with_infinities_and_maxima", "Named")  # fmt: skip
MIXED = "expected scalar type Float but found BFloat16"
EXACT = "precision=fp32 precision.dtype=float64"
KNOBS = {
    "sharding": ("sharding=ddp", "sharding=zero1", "sharding=zero2", "sharding=fsdp"),
    "memory": ("memory=keep_all", "memory=recompute_blocks", "memory=recompute_selected"),
    "parts": ("batch.accumulation_steps=1", "batch.accumulation_steps=2"),
    "compilation": (*["compilation=eager"] * 3, "compilation=compile_blocks"),
    "precision": (EXACT, EXACT, "precision=O1 precision.half_dtype=bfloat16", "precision=bf16_masters"),
}  # fmt: skip
SGD = ("optimizer=sgd_loop", "optimizer.momentum=0",
       f"optimizer.learning_rate={RATE}", "optimizer.weight_decay=0", "optimizer.clip_norm=null",
       "resources.ranks_per_node=2", "resources.threads_per_rank=1",
       f"batch.images_per_step={IMAGES}")  # fmt: skip


def described(model: str) -> tuple[str, ...]:
    if model in OF_OTHERS:
        output = ("model.output=logits",) if model == "Named" else ()
        return ("model=module", f"model.target=tests.user_modules.{model}", *output)
    library, known = ("timm", OF_TIMM) if model in OF_TIMM else ("transformers", OF_TRANSFORMERS)
    arguments = (f"++model.arguments.{key}={value}" for key, value in known[model].items())
    return (f"model={library}", f"model.name={model}", "data=synthetic", "data.num_classes=10",
            "data.num_distinct=16", "batch.resolution_px=32", *arguments)  # fmt: skip


def drawn(model: str, number: int) -> list[tuple[str, ...]]:
    rng = random.Random(model)
    return [tuple(" ".join(map(rng.choice, KNOBS.values())).split()) for _ in range(number)]


def batch(cell: CellSpec, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (IMAGES, *cell.model.input_shape(cell.batch.resolution_px))
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    return images, torch.randint(10, (IMAGES,), generator=generator)


def plain_loop(cell: CellSpec, precision: str = "float64") -> dict[str, torch.Tensor]:
    """Train without any technique; running statistics are those of the first rank, as under DDP.

    Args:
        cell: gives model, seed and accumulation.
        precision: `float64`; `O1`, autocast to bfloat16; or `bf16_masters`, all in bfloat16 but the
            weights that are updated. These begin as copies of the bfloat16 ones, as in apex, but for
            FSDP's shards, which are in float32 from the start.
    """
    held, computes = {"float64": ("double", "double"), "O1": ("float", "float")}.get(
        precision, ("float", "bfloat16")
    )
    torch.manual_seed(cell.seed)
    model = getattr(build_model(cell), held)()  # complex buffers stay complex
    if precision == "bf16_masters" and not cell.sharding.shards_parameters:
        model = model.bfloat16().float()
    parts = cell.batch.accumulation_steps
    for step in range(STEPS):
        images, labels = batch(cell, step)
        replicas = [getattr(deepcopy(model), computes)() for _ in range(2)]
        gradients: dict[str, torch.Tensor] = {}
        for replica, own, wanted in zip(replicas, images.chunk(2), labels.chunk(2), strict=True):
            for x, y in zip(own.chunk(parts), wanted.chunk(parts), strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "O1"):
                    outputs = replica(getattr(x, computes)())
                wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
                (F.cross_entropy(wide, y) / (2 * parts)).backward()
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = gradients.get(name, 0) + getattr(parameter.grad, held)()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    parameter -= RATE * gradients[name]
            for name, buffer in model.named_buffers():
                buffer.copy_(dict(replicas[0].named_buffers())[name])
    return model.state_dict()


def checked(world: World, cell: CellSpec) -> tuple[float, float, float, dict[str, float]]:
    """Return the product's proof and the own one.

    Returns:
        What the proof returned, how far all parameters are from those of the plain loop in float64 as a
        share of what training changed, the largest share that is right, and how far each tensor is.
    """
    world = placed(world, cell)
    proof = prove(cell, world)
    trainer = parallelize(first_model(cell), cell, world)
    trainer.model.train()
    for step in range(STEPS):
        images, labels = (part.chunk(2)[world.rank] for part in batch(cell, step))
        parts = cell.batch.accumulation_steps
        trainer.step(iter(list(zip(images.chunk(parts), labels.chunk(parts), strict=True))))
    found, wanted = plain_weights(trainer), plain_loop(cell)
    if masters := trainer.masters:  # of which the model has rounded copies
        exact = whole_tensors(trainer, masters.of)
        found |= {trainer.names[name]: value.detach() for name, value in exact.items()}
    torch.manual_seed(cell.seed)
    model = build_model(cell).double()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    share, allowed = _share(found, wanted, first), HALF
    if share >= HALF and cell.precision.name != "fp32":
        allowed = PLAIN_TIMES * _share(plain_loop(cell, cell.precision.name), wanted, first)
    apart = {name: float((found[name] - value).abs().max()) for name, value in wanted.items()}
    return proof, share, allowed, apart


def _share(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], first: dict[str, torch.Tensor]
) -> float:
    """How far parameters are from those that are wanted, as a share of how far these have moved."""
    off = torch.stack([(found[name].double() - wanted[name]).norm() for name in first])
    moved = torch.stack([(value - wanted[name]).norm() for name, value in first.items()])
    assert moved.max() > 1e-4
    return float(off.norm() / moved.norm())


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("with_batch_norm", 1),  # the gradient of a bias before it is zero but for rounding
        *(
            pytest.param(model, 2, marks=pytest.mark.full)
            for model in (*OF_TRANSFORMERS, *OF_TIMM, *OF_OTHERS)
        ),
    ],
)
def test_a_model_of_others_is_computed_as_plain_pytorch_does_or_refused(
    model: str, number: int, tmp_path: Path
) -> None:
    if model not in OF_OTHERS:
        pytest.importorskip("timm" if model in OF_TIMM else "transformers")
    for choice in drawn(model, number):
        planned = entry(*described(model), *SGD, *choice)
        if planned.reasons:
            assert all("`" in reason and reason.endswith(".") for reason in planned.reasons), choice
            print(f"{model} {choice}: refused: {planned.reasons[0][:300]}")
            continue
        try:
            found = on_ranks(2, checked, planned.spec, planned.spec, folder=tmp_path)
        except RankFailedError as error:  # the model makes a float32 tensor for bfloat16 weights
            if MIXED not in str(error):
                raise
            with pytest.raises(RuntimeError, match=MIXED):
                plain_loop(planned.spec, planned.spec.precision.name)
            continue
        proof, share, allowed, apart = found[0]
        largest = max(apart.values())
        print(
            f"{model} {choice}: proved {proof:.1e}, apart by {largest:.1e}, {share:.1e} of {allowed:.1e}"
        )
        if "precision=fp32" in choice:
            assert largest < 1e-8, (choice, {n: d for n, d in apart.items() if d >= 1e-8})
        assert share < allowed, (choice, apart)


def unused_after_steps(world: World, cells: dict[str, CellSpec]) -> dict[str, tuple[float, float]]:
    """Return by sharding how far unused and used weights moved; each is proved, too."""
    found = {}
    for name, cell in cells.items():
        world = placed(world, cell)
        prove(cell, world)
        model = first_model(cell)
        before = {n: w.clone() for n, w in model.state_dict().items()}
        trainer = parallelize(model, cell, world)
        for step in range(STEPS):
            trainer.step(iter([tuple(part.chunk(2)[world.rank] for part in batch(cell, step))]))
        moved = {n: float((w - before[n]).abs().max()) for n, w in plain_weights(trainer).items()}
        unused = [moved.pop(n) for n in list(moved) if n.startswith("old_head")]
        found[name] = max(unused), max(moved.values())
    return found


def test_parameters_without_a_gradient_neither_decay_nor_move(tmp_path: Path) -> None:
    """As in PyTorch, where their gradient is None and not zero."""
    chosen = ("model=module", "model.target=tests.user_modules.with_unused_parameters", *SGD,
              *EXACT.split(), "optimizer.weight_decay=0.1", "optimizer.momentum=0.9")  # fmt: skip
    cells = {name: entry(*chosen, f"sharding={name}").spec for name in ("zero1", "ddp", "fsdp")}
    for found in on_ranks(2, unused_after_steps, cells["zero1"], cells, folder=tmp_path):
        for name, (unused, used) in found.items():
            assert unused == 0 < used, name
    flat = entry(*chosen, "optimizer=sgd_contiguous").reasons
    assert any("`old_head.weight`" in reason for reason in flat), flat


def turns_taken(world: World, cells: list[CellSpec]) -> list[float | str]:
    """Return how far weights lie from those of plain PyTorch, or why the training ended."""
    found: list[float | str] = []
    for cell in cells:
        model: Any = first_model(cell)
        plain: Any = deepcopy(model).to(torch.float64)
        trainer = parallelize(model, cell, placed(world, cell))
        sgd = torch.optim.SGD(plain.parameters(), RATE, momentum=0.9)
        try:
            for step in range(4):
                images, labels = batch(cell, step)
                trainer.step(iter([(images.chunk(2)[world.rank], labels.chunk(2)[world.rank])]))
                sgd.zero_grad()
                for rank, part in enumerate(zip(images.chunk(2), labels.chunk(2), strict=True)):
                    plain.rank, plain.calls = rank, step
                    (F.cross_entropy(plain(part[0]), part[1]) / 2).backward()
                sgd.step()
            weights = plain_weights(trainer)
            pairs = ((weights[name], weight) for name, weight in plain.state_dict().items())
            found.append(max(float((own - weight).abs().max()) for own, weight in pairs))
        except VitsweepError as error:
            found.append(str(error))
    return found


def test_ranks_take_turns_with_parameters_as_in_plain_pytorch(tmp_path: Path) -> None:
    """Where a sharding cannot leave out a block, each rank refuses in the first step."""
    chosen = (
        "model=module",
        *SGD,
        *EXACT.split(),
        "optimizer.momentum=0.9",
        "measurement.prove=none",
    )
    rows = [
        (target, sharding)
        for target in ("two_heads", "layer_drop")
        for sharding in ("ddp", "zero1", "fsdp")
    ]
    cells = [
        entry(
            *chosen, f"model.target=tests.user_modules.with_{target}", f"sharding={sharding}"
        ).spec
        for target, sharding in rows
    ]
    for found in on_ranks(2, turns_taken, cells[0], cells, folder=tmp_path):
        *trained, refused = found
        assert max(trained) < 1e-10
        assert {"`sharding=fsdp`", "`sharding=ddp`", "`sharding=zero1`"} <= named(refused)


def test_the_noise_of_the_proof_is_finite_among_infinities_and_finds_maxima() -> None:
    alone = ("model=module", "model.target=tests.user_modules.with_infinities_and_maxima",
             "batch.images_per_step=16", "sharding=none", "resources.ranks_per_node=1")  # fmt: skip
    assert prove(entry(*alone).spec, one_rank()) < 1e-5


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16_params"])
def test_norms_without_weight_or_bias_are_trained_in_half_precision(precision: str) -> None:
    alone = ("model=module", "model.target=tests.user_modules.with_norms_of_fewer_parameters",
             "batch.images_per_step=16", "sharding=none", "resources.ranks_per_node=1",
             f"precision={precision}", "precision.half_dtype=bfloat16")  # fmt: skip
    if precision == "bf16_params":
        alone = alone[:-1]
    prove(entry(*alone).spec, one_rank())


def test_the_proof_sees_the_imaginary_part_of_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a technique may drop, as a cast to a real dtype does."""

    def conjugated(model: torch.nn.Module, *args: Any, **named: Any) -> torch.nn.Module:
        for buffer in model.buffers():
            buffer.data = buffer.data.conj().resolve_conj() if buffer.is_complex() else buffer.data
        return model

    alone = ("model=module", "model.target=tests.user_modules.with_unread_complex_buffer",
             "batch.images_per_step=16", "sharding=none", "resources.ranks_per_node=1")  # fmt: skip
    cell = entry(*alone).spec
    assert prove(cell, one_rank()) < 1e-5
    monkeypatch.setattr("vitsweep.parallelize.cast_model", conjugated)
    with pytest.raises(WrongResultError, match="buffer of"):
        prove(cell, one_rank())
