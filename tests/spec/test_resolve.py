"""Every `auto` gets its value when the sweep is made, from the machine that will run the cell."""

from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from tests.cells import GPU_NODE, LAPTOP, TINY, composer, entry
from tests.refusals import require
from vitsweep.composition.grid import expand
from vitsweep.errors import BadValueError
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.spec.resolve import resolve
from vitsweep.spec.resources import AXES, Machine, MeshShape, count_gpus

BARE = Machine(device="cpu", cores_per_node=1, devices_per_node=0)


def resolved(*overrides: str, machine: Machine = LAPTOP) -> dict[str, Any]:
    return resolve(composer().compose(list(overrides)).tree, machine)


def autos(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [found for value in node.values() for found in autos(value)]
    return [node] if node == "auto" else []


def cell_parts(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: node for key, node in tree.items() if key not in ("sweep", "tracker")}


def test_no_auto_is_left() -> None:
    for machine in [LAPTOP, GPU_NODE, BARE]:
        for overrides in [
            [],
            ["precision=O1"],
            ["sharding=hsdp"],
            ["model=vit_base", "data=synthetic"],
        ]:
            tree = composer().compose(overrides).tree
            assert autos(cell_parts(tree))
            left = cell_parts(resolve(tree, machine))
            # `attention.backend=auto` is torch's own word for choosing a kernel at run time
            # `measurement.start` follows from all cells of a baseline
            assert left["measurement"].pop("start") == "auto"
            assert autos(left | {"attention": {}}) == []


def test_the_tree_that_was_composed_is_not_changed() -> None:
    tree = composer().compose(["precision=O2", "sharding=hsdp"]).tree
    before = deepcopy(tree)
    resolve(tree, GPU_NODE)
    assert tree == before


def test_resolving_twice_changes_nothing() -> None:
    once = resolved("precision=O1", "sharding=hsdp", machine=GPU_NODE)
    assert resolve(once, GPU_NODE) == once


def test_half_precision_is_float16_with_a_scaler_on_gpus_only() -> None:
    for precision, machine, half, scale in [
        ("O1", LAPTOP, "bfloat16", None),
        ("O2", LAPTOP, "bfloat16", None),
        ("O3", LAPTOP, "bfloat16", None),
        ("O1", GPU_NODE, "float16", "dynamic"),
        ("O2", GPU_NODE, "float16", "dynamic"),
        ("O3", GPU_NODE, "float16", None),
        ("bf16", GPU_NODE, "bfloat16", None),
        ("bf16_params", GPU_NODE, "bfloat16", None),
        ("bf16_masters", GPU_NODE, "bfloat16", None),
    ]:
        node = resolved(f"precision={precision}", machine=machine)["precision"]
        assert (node["half_dtype"], node["loss_scale"]) == (half, scale)


def test_a_loss_scale_follows_the_half_precision_that_was_typed() -> None:
    typed = resolved("precision=O1", "precision.half_dtype=float16")["precision"]
    assert typed["loss_scale"] == "dynamic"
    typed = resolved("precision=O1", "precision.half_dtype=bfloat16", machine=GPU_NODE)["precision"]
    assert typed["loss_scale"] is None


def test_a_cell_on_the_cpu_of_a_gpu_node_computes_as_on_a_cpu() -> None:
    tree = resolved("precision=O1", "resources.device=cpu", machine=GPU_NODE)
    assert tree["precision"]["half_dtype"] == "bfloat16"
    assert tree["resources"]["ranks_per_node"] == 2
    assert tree["resources"]["threads_per_rank"] == 32


@pytest.mark.parametrize(
    ("overrides", "machine", "eps"),
    [
        (["precision=O3"], GPU_NODE, 1e-4),
        (["precision=O3"], LAPTOP, 1e-8),
        (["precision=O2"], GPU_NODE, 1e-8),
        (["precision=O1"], GPU_NODE, 1e-8),
        (["precision=fp32"], GPU_NODE, 1e-8),
        (["precision=O3", "optimizer.eps=1e-6"], GPU_NODE, 1e-6),
    ],
)
def test_eps_grows_only_where_the_second_moment_is_float16(
    overrides: list[str], machine: Machine, eps: float
) -> None:
    assert resolved(*overrides, machine=machine)["optimizer"]["eps"] == eps


@pytest.mark.parametrize(
    ("overrides", "machine", "ranks", "threads"),
    [
        ([], LAPTOP, 2, 1),
        ([], GPU_NODE, 8, 8),
        ([], BARE, 2, 1),
        (["resources.ranks_per_node=1"], LAPTOP, 1, 2),
        (["resources.ranks_per_node=4"], LAPTOP, 4, 1),
        (["resources.ranks_per_node=2"], GPU_NODE, 2, 32),
        (["resources.threads_per_rank=3"], GPU_NODE, 8, 3),
    ],
)
def test_ranks_are_the_gpus_or_two_and_share_the_cores(
    overrides: list[str], machine: Machine, ranks: int, threads: int
) -> None:
    node = resolved(*overrides, machine=machine)["resources"]
    assert (node["device"], node["ranks_per_node"]) == (machine.device, ranks)
    assert node["threads_per_rank"] == threads
    assert node["cores_per_node"] == machine.cores_per_node
    assert node["devices_per_node"] == machine.devices_per_node


RANKS_4 = "resources.ranks_per_node=4"
NODES_2 = "resources.nodes=2"


def test_a_method_takes_the_world_and_replicas_are_what_is_left() -> None:
    for overrides, degrees in [
        ([], {"replicate": 2}),
        (["sharding=none", "resources.ranks_per_node=1"], {}),
        (["sharding=fsdp", RANKS_4], {"shard": 4}),
        (["sharding=zero2", RANKS_4], {"shard": 4}),
        (["sharding=zero1", RANKS_4], {"replicate": 4}),
        (["sharding=hsdp", RANKS_4], {"replicate": 2, "shard": 2}),
        (["sharding=hsdp", RANKS_4, NODES_2], {"replicate": 2, "shard": 4}),
        (["sharding=hsdp", RANKS_4, "mesh.shard=4"], {"shard": 4}),
        (["sequence_parallel=ulysses"], {"ulysses": 2}),
        (["sequence_parallel=ulysses", "sharding=fsdp"], {"ulysses": 2}),
        (["sequence_parallel=ulysses", RANKS_4, "mesh.ulysses=2"], {"replicate": 2, "ulysses": 2}),
        (
            ["sequence_parallel=ulysses", RANKS_4, "mesh.ulysses=2", "sharding=fsdp"],
            {"shard": 2, "ulysses": 2},
        ),
        (["sharding=fsdp", RANKS_4, "mesh.shard=2"], {"replicate": 2, "shard": 2}),
        (["mesh.shard=3"], {"replicate": 0, "shard": 3}),
    ]:
        mesh = resolved(*overrides)["mesh"]
        axes = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")
        assert mesh == dict.fromkeys(axes, 1) | degrees


def test_two_methods_that_share_the_world_ask_for_a_degree() -> None:
    both = ["sequence_parallel=ulysses", "tensor_parallel=megatron", RANKS_4]
    with pytest.raises(BadValueError) as error:
        resolved(*both)
    require(str(error.value), "4 `mesh.ulysses` `mesh.tensor`")
    mesh = resolved(*both, "mesh.tensor=2")["mesh"]
    assert (mesh["ulysses"], mesh["tensor"]) == (2, 2)


def test_gradients_live_in_the_buckets_unless_the_optimizer_keeps_them() -> None:
    def views(*overrides: str) -> bool:
        return bool(resolved(*overrides)["sharding"]["gradient_as_bucket_view"])

    assert views()
    assert views("optimizer=sgd_fused")
    assert not views("optimizer=adamw_contiguous")
    assert not views("optimizer=sgd_contiguous")
    assert views("optimizer=sgd_contiguous", "sharding.gradient_as_bucket_view=true")


@pytest.mark.parametrize(
    ("data", "side", "channels", "classes"),
    [("digits", 8, 1, 10), ("synthetic", 224, 3, 1000)],
)
def test_image_size_channels_and_classes_come_from_the_data(
    data: str, side: int, channels: int, classes: int
) -> None:
    tree = resolved(f"data={data}")
    assert tree["batch"]["resolution_px"] == side
    assert tree["model"]["in_channels"] == channels
    assert tree["model"]["num_classes"] == classes
    assert resolved(f"data={data}", "batch.resolution_px=32")["batch"]["resolution_px"] == 32


@pytest.mark.parametrize("key", ["batch.images_per_step", "model.depth", "optimizer.learning_rate"])
def test_auto_is_refused_where_nothing_says_what_it_means(key: str) -> None:
    with pytest.raises(BadValueError, match=f"`{key}=auto`: must be a"):
        entry(f"{key}=auto")


def test_gpus_are_counted_as_far_as_they_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: (9, 0))
    for visible, count in ((None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert count_gpus() == 0
    assert Machine.here().device == "cpu"


@pytest.mark.parametrize(
    ("machine", "warmup", "window"), [(LAPTOP, 0.2, 0.5), (GPU_NODE, 1.0, 1.5)]
)
def test_the_timed_window_lasts_longer_on_a_gpu_whose_clocks_settle_in_seconds(
    machine: Machine, warmup: float, window: float
) -> None:
    found = resolved("measurement=standard", machine=machine)["measurement"]
    assert (found["warmup_min_seconds"], found["min_seconds"]) == (warmup, window)
    chosen = resolved("measurement.min_seconds=2", machine=machine)["measurement"]
    assert chosen["min_seconds"] == 2
    wanted = 5 if machine is GPU_NODE else 10
    for typed, steps in (((), wanted), (("measurement.measured_steps=20",), 20)):
        assert entry(*typed, machine=machine).spec.measurement.least_steps == steps
    assert resolved("measurement=smoke", machine=machine)["measurement"]["min_seconds"] == 0


def test_one_cell_keeps_its_identity_on_a_cpu_and_on_a_gpu() -> None:
    given = ("resources.ranks_per_node=2", "resources.threads_per_rank=1")
    on_cpu, on_gpu = (entry(*given, machine=m).spec for m in (LAPTOP, GPU_NODE))
    assert on_cpu.measurement.min_seconds != on_gpu.measurement.min_seconds
    assert on_cpu.cell_id == on_gpu.cell_id


@pytest.mark.parametrize(
    "inner",
    [{"tensor": 8}, {"ulysses": 2, "tensor": 2}, {"ring": 16}, {"pipeline": 4, "sequence": 4}, {}],
)
def test_the_ranks_of_a_group_have_the_same_positions_on_all_of_its_nodes(
    inner: dict[str, int],
) -> None:
    """So that messages between nodes of 8 GPUs keep to their rails."""
    degrees = dict.fromkeys(AXES, 1) | inner
    mesh = MeshShape(**degrees | {"replicate": 128 // prod(degrees.values())})
    for axis in range(len(AXES)):
        groups: dict[tuple[int, ...], dict[int, set[int]]] = {}
        for rank in range(128):
            at = mesh.coordinates(rank)
            nodes = groups.setdefault((*at[:axis], *at[axis + 1 :]), {})
            nodes.setdefault(rank // 8, set()).add(rank % 8)
        for nodes in groups.values():
            assert len({frozenset(places) for places in nodes.values()}) == 1


def test_ranks_of_a_scaling_curve_have_equal_cores() -> None:
    def threads(*overrides: str) -> list[tuple[int, int]]:
        composed = expand([*TINY, *overrides], composer())
        entries = plan_of(composed, replace(LAPTOP, cores_per_node=8), composer()).entries
        resources = [entry.spec.resources for entry in entries.values()]
        return [(node.ranks_per_node, node.threads_per_rank) for node in resources]

    assert threads("resources.ranks_per_node=1") == [(1, 8)]
    assert threads("resources.ranks_per_node=1,2,4") == [(1, 2), (2, 2), (4, 2)]
    cells = "sweep.cells=[['resources.ranks_per_node=1'],[]]"  # `auto` is 2 ranks
    assert threads(cells) == [(1, 4), (2, 4)]
    typed = threads("resources.ranks_per_node=1,2", "resources.threads_per_rank=3")
    assert typed == [(1, 3), (2, 3)]
