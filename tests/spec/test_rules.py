"""What cannot run is refused before anything starts, with a way out that works."""

import re
from importlib import metadata

import pytest

from tests.cells import GPU_NODE, LAPTOP, TINY, entry
from tests.refusals import require
from vitsweep import torch_compat
from vitsweep.planning import freeze
from vitsweep.proof.twin import twin_of
from vitsweep.spec.resources import Machine
from vitsweep.spec.rules import conflicts

WAY_OUT = re.compile(r"(?:try|use|Try|Use) `([\w.]+=[\w.]+)`")


def reasons(*overrides: str, machine: Machine = LAPTOP) -> tuple[str, ...]:
    return entry(*TINY, *overrides, machine=machine).reasons


def way_out(reason: str) -> str:
    found = WAY_OUT.search(reason)
    assert found, f"no way out in: {reason}"
    return found[1]


RANKS_4 = "resources.ranks_per_node=4"


def test_a_short_window_may_be_shorter_than_what_auto_stands_for() -> None:
    for device in (LAPTOP, GPU_NODE):
        typed = ("measurement=standard", "measurement.max_seconds=0.1")
        assert not [r for r in reasons(*typed, machine=device) if "seconds" in r]


def test_a_rule_names_the_knob_its_value_and_the_way_out() -> None:
    for overrides, names in [
        (
            ["batch.resolution_px=10", "model.patch_px=4"],
            "`batch.resolution_px=10` `model.patch_px=4` `batch.resolution_px=8`",
        ),
        (
            ["batch.resolution_px=2", "model.patch_px=4"],
            "`batch.resolution_px=2` `model.patch_px=4` `data=image_folder` `batch.resolution_px=4`",
        ),
        (
            ["batch.images_per_step=15"],
            "`batch.images_per_step=15` `batch.accumulation_steps=1` `batch.images_per_step=14` 2",
        ),
        (
            ["batch.images_per_step=1", "batch.accumulation_steps=4"],
            "`batch.images_per_step=1` `batch.accumulation_steps=4` `batch.images_per_step=8` 2",
        ),
        (
            ["batch.images_per_step=3", "batch.scope=per_replica", "batch.accumulation_steps=2"],
            "`batch.images_per_step=3` `batch.accumulation_steps=2` `batch.images_per_step=2` 2",
        ),
        (
            ["batch.images_per_step=1198", RANKS_4],
            "`batch.images_per_step=1198` `batch.accumulation_steps=1` `batch.images_per_step=1196` 4",
        ),
        (
            ["batch.images_per_step=2000"],
            "`batch.images_per_step=2000` `batch.scope=total` `data=digits` `data=synthetic` 2000 1198",
        ),
        (
            ["resources.device=cuda"],
            "`resources.device=cuda` `resources.device=cpu` `hydra/launcher=slurm`",
        ),
        (
            ["sharding=none"],
            "`sharding=none` `sharding=ddp` `resources.ranks_per_node=1` 2",
        ),
        (
            ["sharding=hsdp"],
            "`sharding=hsdp` `mesh.shard=1` `mesh.shard` `sharding=fsdp` 2 1 4 6 8",
        ),
        (
            ["sharding=fsdp", RANKS_4, "mesh.shard=2"],
            "`sharding=fsdp` `mesh.shard=2` `mesh.shard=auto` `sharding=hsdp` 2",
        ),
        (
            ["model.num_heads=3"],
            "`model.width=32` `model.num_heads=3`",
        ),
        (
            ["model.in_channels=3"],
            "`model.in_channels=3` `data=digits` `model.in_channels=auto` 1",
        ),
        (
            ["model.num_classes=5"],
            "`model.num_classes=5` `data=digits` `model.num_classes=auto` 10",
        ),
        (
            ["task=train", "model.num_classes=12"],
            "`model.num_classes=12` `data=digits` `model.num_classes=auto` 10",
        ),
        (
            ["task=train", "task.epochs=3", "task.warmup_epochs=40"],
            "`task.warmup_epochs=40` `task.epochs=3`",
        ),
        (
            ["measurement.min_seconds=5", "measurement.max_seconds=1"],
            "`measurement.min_seconds=5` `measurement.max_seconds=1` `measurement.min_seconds=1`",
        ),
        (
            ["measurement.warmup_min_seconds=5", "measurement.max_seconds=1"],
            "`measurement.warmup_min_seconds=5` `measurement.max_seconds=1`",
        ),
        (
            ["measurement.measured_steps=4", "measurement.fewest_steps=9"],
            "`measurement.fewest_steps=9` `measurement.measured_steps=4` `measurement.fewest_steps=4`",
        ),
        (
            ["mesh.ulysses=2"],
            "`mesh.ulysses=2` `sequence_parallel=none` `sequence_parallel`",
        ),
        (
            ["precision=O3", "precision.loss_scale=dynamic"],
            "`precision.loss_scale=dynamic` `precision.master_weights=true` `precision.loss_scale=null`",
        ),
        (
            ["precision=O2", "precision.patch_torch_functions=true"],
            "`precision.cast_model_type=half` `precision.patch_torch_functions=true`",
        ),
        (
            ["precision=O1", "precision.master_weights=true"],
            "`precision.master_weights=true` `precision.cast_model_type=half`",
        ),
        (
            ["precision.tf32=true"],
            "`precision.tf32=true` `resources.device=cpu` `precision.tf32=false` `precision=bf16`",
        ),
        (
            ["sharding.static_graph=true", "batch.accumulation_steps=2"],
            "`sharding.static_graph=true` `batch.accumulation_steps=2`",
        ),
    ]:
        [reason] = reasons(*overrides)
        require(reason, names)


def test_the_way_out_of_one_refusal_is_runnable() -> None:
    for overrides in [
        ["batch.resolution_px=10", "model.patch_px=4"],
        ["batch.images_per_step=15"],
        ["batch.images_per_step=1", "batch.accumulation_steps=4"],
        ["batch.images_per_step=3", "batch.scope=per_replica", "batch.accumulation_steps=2"],
        ["batch.images_per_step=1198", RANKS_4],
        ["resources.device=cuda"],
        ["sharding=none"],
        ["sharding=fsdp", RANKS_4, "mesh.shard=2"],
        ["model.in_channels=3"],
        ["model.num_classes=5"],
        ["precision.tf32=true"],
        ["sequence_parallel=ulysses", RANKS_4, "model.num_heads=2"],
    ]:
        [reason] = reasons(*overrides)
        assert reasons(*overrides, way_out(reason)) == ()


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["mesh.shard=3"], "mesh.shard=3"),
        (["mesh.shard=3", "sharding=hsdp", RANKS_4], "mesh.shard=3"),
        (
            ["mesh.ring=2", "mesh.ulysses=3", "sequence_parallel=usp", RANKS_4],
            "mesh.ring=2 mesh.ulysses=3",
        ),
        (["mesh.shard=8", "sharding=fsdp"], "mesh.shard=8"),
    ],
)
def test_degrees_that_do_not_divide_the_world_are_refused(overrides: list[str], asked: str) -> None:
    assert any(reason.startswith(f"`{asked}` ") for reason in reasons(*overrides))


def test_the_degree_advised_divides_the_world_that_there_is() -> None:
    found = reasons("sequence_parallel=ulysses", "mesh.ulysses=3", RANKS_4, "model.num_heads=4")
    assert any("Try `mesh.ulysses=2`" in reason for reason in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_hsdp_needs_a_world_that_factors(ranks: int) -> None:
    given = [f"resources.ranks_per_node={ranks}", "batch.scope=per_replica"]
    [reason] = reasons("sharding=hsdp", *given)
    assert f"`mesh.shard=1` over {ranks} ranks" in reason


@pytest.mark.parametrize(
    "place",
    [
        [RANKS_4],
        ["resources.ranks_per_node=6"],
        ["resources.nodes=2", "resources.ranks_per_node=3"],
        ["resources.ranks_per_node=6", "mesh.shard=2"],
        ["resources.ranks_per_node=9"],
    ],
)
def test_hsdp_runs_where_the_world_factors(place: list[str]) -> None:
    assert reasons("sharding=hsdp", "batch.scope=per_replica", *place) == ()


def test_more_ranks_than_gpus_are_refused_on_a_node() -> None:
    [reason] = reasons("resources.ranks_per_node=16", machine=GPU_NODE)
    require(reason, "`resources.ranks_per_node=16`")
    assert reasons(way_out(reason), machine=GPU_NODE) == ()
    assert reasons("resources.nodes=4", "batch.images_per_step=64", machine=GPU_NODE) == ()


def test_more_threads_than_a_node_can_start_are_refused() -> None:
    for words in (["resources.threads_per_rank=1000000"], ["resources.ranks_per_node=100000"]):
        found = reasons(*words, "data=synthetic", "batch.scope=per_replica")
        assert any("128 threads" in text and f"`{words[0]}`" in text for text in found)


FP8_OF_ALL = ("precision=fp8", "precision.layers=all")


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    def version(name: str) -> str:
        if found.get(name) == "":
            raise metadata.PackageNotFoundError(name)
        return found.get(name) or metadata.version(name)

    for module in (torch_compat, freeze):
        monkeypatch.setattr(module, "version", version)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torchao": ""}, "needs torchao: `pip install 'vitsweep[fp8]'`"),
        ({"torch": "2.9.1+cu128", "torchao": "0.18.0"}, "`pip install 'torchao<0.18'`"),
    ],
)
def test_fp8_is_refused_without_a_torchao_of_this_torch(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], words: str
) -> None:
    versions(monkeypatch, **found)
    [reason] = reasons(*FP8_OF_ALL, "batch.images_per_step=128", machine=GPU_NODE)
    assert reason.startswith("`precision=fp8` needs torchao")
    assert words in reason
    assert reasons(way_out(reason), machine=GPU_NODE) == ()
    if "torch" in found:
        versions(monkeypatch, **found | {"torchao": "0.17.0"})
        assert reasons(*FP8_OF_ALL, "batch.images_per_step=128", machine=GPU_NODE) == ()


def test_a_torch_newer_than_was_tried_is_reported_and_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "torch_is_untried" not in freeze.code_state()
    major, second = torch_compat.minor(torch_compat.NEWEST)
    versions(monkeypatch, torch=f"{major}.{second + 1}.0a0+git")
    with pytest.warns(
        freeze.UntriedTorchWarning, match=rf"^torch {major}\.{second + 1}\.0a0\+git is "
    ):
        assert freeze.code_state()["torch_is_untried"]


FP8 = (*FP8_OF_ALL, "resources.ranks_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "rows", "nearest"),
    [
        # 17 tokens, the class token among them: only a multiple of 16 images will do.
        (["batch.images_per_step=16"], "8 x 17", "batch.images_per_step=32"),
        (["batch.images_per_step=72"], "36 x 17", "batch.images_per_step=96"),
        (
            ["batch.images_per_step=10", "batch.scope=per_replica", "batch.accumulation_steps=2"],
            "5 x 17",
            "batch.images_per_step=32",
        ),
        # 16 patches shared by two ranks: any even number of images will do.
        (
            ["classifier=pooled", "sequence_parallel=ulysses", "batch.images_per_step=15"],
            "15 x 8",
            "batch.images_per_step=16",
        ),
        # 8 of 16 patches are kept: any even number of images will do.
        (
            ["classifier=pooled", "tokens=drop", "batch.images_per_step=18"],
            "9 x 8",
            "batch.images_per_step=20",
        ),
        # 19 of 32 images are computed; of 53 images 32 are.
        (
            ["vit_block=drop_samples", "batch.images_per_step=64"],
            "19 x 17",
            "batch.images_per_step=106",
        ),
    ],
)
def test_fp8_is_refused_where_its_rows_are_no_multiple_of_16_and_the_hint_runs(
    overrides: list[str], rows: str, nearest: str
) -> None:
    [reason] = reasons(*FP8, *overrides, machine=GPU_NODE)
    assert f"16; got {rows}" in reason
    assert way_out(reason) == nearest
    assert reasons(*FP8, *overrides, nearest, machine=GPU_NODE) == ()


def test_emulated_fp8_takes_any_number_of_rows() -> None:
    assert reasons(*FP8_OF_ALL, "precision.emulate=true") == ()


@pytest.mark.parametrize("choice", ["vit_block=plain", "vit_block=drop_samples", "tokens=drop"])
def test_the_twin_of_an_fp8_cell_has_rows_that_its_products_take(choice: str) -> None:
    planned = entry(*TINY, *FP8, choice, "batch.images_per_step=54", machine=GPU_NODE)
    twin = twin_of(planned.spec)
    assert twin.vit_block.kept(twin.micro_batch) * (twin.num_tokens or 0) % 16 == 0
    assert not [reason for reason in conflicts(twin) if "divisible by 16" in reason]


def test_all_reasons_of_a_cell_are_reported_at_once() -> None:
    found = reasons(
        "sharding=hsdp",
        "batch.images_per_step=15",
        "model.num_heads=3",
        "attention=sdpa_cudnn",
    )
    for knob in ("sharding=hsdp", "batch.images_per_step=15", "model.num_heads=3", "attention="):
        assert any(f"`{knob}" in reason for reason in found)
    assert len(set(found)) == len(found)


def test_a_pipeline_that_the_ranks_do_not_fill_is_refused_in_words() -> None:
    planned = entry("resources.ranks_per_node=3", "pipeline_parallel=gpipe", "mesh.pipeline=2")
    assert planned.reasons
    assert not any("ZeroDivision" in reason for reason in planned.reasons)
