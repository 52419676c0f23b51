from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_utils

from tests.cells import GPU_NODE, TINY, entry
from tests.cells import cell as tiny
from tests.choices import choice
from tests.data.cells_and_worlds import world
from tests.ranks import on_ranks, placed
from tests.refusals import require
from tests.shapes import CASES, build, step
from vitsweep.cell import _refuse_skipped_graphs
from vitsweep.errors import VitsweepError
from vitsweep.measure.environment import Compiled
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.techniques.compilation.torch_compile import TorchCompile

ALONE = world()
COMPILED = ["compile_blocks", "compile_model"]


def cell(device="cpu"):
    return SimpleNamespace(resources=SimpleNamespace(device=device))


def assert_compiled_equals_plain(name, memory="keep_all", attention="sdpa_auto", **kwargs):
    """Output and gradients agree, and no part of the model is left uncompiled.

    In float32: torch 2.11 takes the statistics of its CPU flash kernel for float32 when it compiles
    a float64 model, and fails.
    """
    kwargs |= {"dtype": torch.float32}
    plain = step(build(**kwargs))
    torch._dynamo.reset()
    counters.clear()
    model = choice("memory", memory).apply(choice("attention", attention).apply(build(**kwargs)))
    compiled = step(choice("compilation", name).apply(model))

    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("compile_blocks", "keep_all"),
        pytest.param("compile_blocks", "recompute_blocks", marks=pytest.mark.full),
        pytest.param("compile_blocks", "recompute_selected", marks=pytest.mark.full),
        pytest.param("compile_model", "keep_all", marks=pytest.mark.full),
    ],
)
def test_compiled_gradients_equal_those_of_the_reference_model(name, memory):
    assert_compiled_equals_plain(name, memory)


@pytest.mark.full
@pytest.mark.parametrize("attention", ["sdpa_auto", "sdpa_math", "sdpa_flash", "mha_module"])
@pytest.mark.parametrize("memory", ["keep_all", "recompute_blocks", "recompute_selected"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_gradients_equal_in_every_combination(name, memory, attention):
    assert_compiled_equals_plain(name, memory, attention, **CASES["mean_batch_second"])


@pytest.mark.parametrize("name", COMPILED)
def test_names_of_parameters_stay(name):
    model = choice("compilation", name).apply(build())

    assert list(model.state_dict()) == list(build().state_dict())


@pytest.mark.parametrize("name", COMPILED)
def test_a_missing_compiler_is_named(name, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    (reason,) = choice("compilation", name).conflicts(cell())

    ways_out = "`apt-get install g++` `compilation=eager`"
    require(reason, f"`compilation={name}` `no-such-compiler -m64` {ways_out}")
    assert not list(choice("compilation", name).conflicts(cell("cuda")))


def _graphs(world, specs):
    found = []
    for spec in specs:
        torch._dynamo.reset()
        before = Compiled.so_far()
        here = placed(world, spec)
        trainer = parallelize(build_model(spec), spec, here)
        trainer.step(iter(my_share(spec, global_batch(spec, 0, here), here)))
        found.append(Compiled.so_far().since(before).graphs)
    return found


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_are_cut_by_buckets_only_where_gradients_are_exchanged(ranks, tmp_path):
    """DDP cuts at its buckets where gradients are shared; FSDP's hooks cut at every block."""
    compiled = ("compilation=compile_model", f"resources.ranks_per_node={ranks}")
    small = ("sharding=ddp", "sharding.bucket_mib=1", "model.width=160", "model.mlp_width=640")
    cells = [tiny(*compiled, *small), tiny(*compiled, "sharding=fsdp")]
    blocks = tiny("compilation=compile_blocks", "sharding=zero1", *compiled[1:])
    of_ddp, of_fsdp, of_blocks = on_ranks(
        ranks, _graphs, cells[0], [*cells, blocks], folder=tmp_path, seconds=1000
    )[0]
    assert (of_ddp > 1) is (ranks > 1)
    assert of_fsdp >= cells[1].model.depth
    assert of_blocks == 1


def test_buckets_below_those_of_the_compiler_are_refused():
    small = ("compilation=compile_blocks", "sharding.bucket_mib=0.5")
    [reason] = entry(*TINY, *small, "resources.ranks_per_node=2").reasons
    assert "use `sharding.bucket_mib=1`, or `compilation=eager`" in reason
    assert not entry(*TINY, *small, "resources.ranks_per_node=1").reasons


MODES = {
    (): "with `resources.device=cpu`:",
    ("compilation=compile_blocks",): "`compilation=compile_blocks`",
    ("resources.ranks_per_node=2",): "`sharding=ddp` on 2 ranks",
    ("batch.accumulation_steps=2",): "`batch.accumulation_steps=2`",
}


@pytest.mark.parametrize("chosen", MODES, ids=" ".join)
def test_what_a_mode_cannot_do_is_named(chosen):
    compiled = [] if "compilation=compile_blocks" in chosen else ["compilation=compile_model"]
    one = [] if "resources.ranks_per_node=2" in chosen else ["resources.ranks_per_node=1"]
    mode = "compilation.mode=reduce_overhead"
    [reason] = entry(*TINY, *compiled, *one, mode, *chosen).reasons
    assert MODES[chosen] in reason


def test_a_graph_per_model_is_taken_on_one_gpu():
    chosen = ("compilation=compile_model", "compilation.mode=reduce_overhead", "sharding=none")
    one = ("resources.nodes=1", "resources.ranks_per_node=1")
    assert not entry(*TINY, *chosen, *one, machine=GPU_NODE).reasons


def _train(world, specs):
    found = []
    for spec in specs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        trainer = parallelize(build_model(spec), spec, world)
        shares = [my_share(spec, global_batch(spec, step, world), world) for step in range(3)]
        found.append([float(trainer.step(iter(share))) for share in shares])
    return found


@pytest.mark.full
def test_compiled_blocks_train_the_same_and_their_seconds_are_counted(tmp_path):
    chosen = ("resources.ranks_per_node=1", "sharding=none", "optimizer=adamw_foreach")
    plain = tiny(*chosen)
    compiled = tiny(*chosen, "compilation=compile_blocks")
    torch._dynamo.reset()  # sets its seconds to zero, and so does `_train`
    before = Compiled.so_far()
    [[theirs, ours]] = [_train(ALONE, [plain, compiled])]
    spent = Compiled.so_far().since(before)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert spent.graphs >= 1
    assert spent.seconds > 0.1


def test_a_cuda_graph_that_torch_leaves_out_fails_the_run_by_name():
    graphs = ("compilation=compile_model", "compilation.mode=reduce_overhead", "sharding=none")
    planned = entry(*TINY, *graphs, "resources.ranks_per_node=1", machine=GPU_NODE)
    before = Compiled.so_far()
    _refuse_skipped_graphs(planned.spec, Compiled.so_far().since(before))
    cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")
    compiled = Compiled.so_far().since(before)
    with pytest.raises(VitsweepError, match=r"\b1 of them"):
        _refuse_skipped_graphs(planned.spec, compiled)
    _refuse_skipped_graphs(tiny("compilation=compile_model"), compiled)


PARALLEL = {
    "megatron": ("tensor_parallel=megatron", "mesh.tensor=2"),
    "megatron_sp": ("sequence_parallel=megatron_sp", "mesh.tensor=2"),
    "ulysses": ("sequence_parallel=ulysses", "mesh.ulysses=2"),
    "ring": ("sequence_parallel=ring", "mesh.ring=2"),
    "lasp": ("sequence_parallel=lasp", "attention=linear", "attention.causal=true", "classifier=pooled"),
    "lasp2": ("sequence_parallel=lasp2", "attention=linear"),
}  # fmt: skip


def graphs_and_breaks(start, specs):
    """Train a step of each cell whose blocks Dynamo traces; nothing is generated from the graphs."""
    TorchCompile.arguments = {"dynamic": False, "backend": "eager"}
    found = []
    for spec in specs:
        here = placed(start, spec)
        torch._dynamo.reset()
        counters.clear()
        trainer = parallelize(build_model(spec), spec, here)
        trainer.step(spec.data.open(spec, here).train(0))
        found.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    return found


def test_a_block_whose_ranks_share_tokens_or_matrices_is_one_graph(tmp_path):
    common = ("compilation=compile_blocks", "sharding=ddp", "attention=sdpa_auto")
    specs = [tiny(*common, *overrides) for overrides in PARALLEL.values()]
    [found, _] = on_ranks(2, graphs_and_breaks, specs[0], specs, folder=tmp_path)
    assert dict(zip(PARALLEL, found, strict=True)) == dict.fromkeys(PARALLEL, (1, {}))


def test_a_mode_is_what_torch_compile_is_given(monkeypatch):
    for mode, given in (
        ("default", {"dynamic": False, "mode": "default"}),
        ("reduce_overhead", {"dynamic": False, "mode": "reduce-overhead"}),
        ("max_autotune", {"dynamic": False, "options": {"max_autotune": True}}),
    ):
        own = choice("compilation", "compile_blocks", mode=mode)
        assert own.replays_graphs is (mode == "reduce_overhead")
        seen: list[dict] = []
        module = SimpleNamespace(compile=lambda seen=seen, **more: seen.append(more))
        monkeypatch.setattr(torch._dynamo.config, "enable_p2p_compilation", False, raising=False)
        own.compile(module)
        assert seen == [given]
        assert torch._dynamo.config.enable_p2p_compilation is True
