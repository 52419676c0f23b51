from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.choices import choice
from tests.shapes import CASES, build, step

COMPILED = ["compile_blocks", "compile_model"]

VALUES = {"ddp": {"gradient_as_bucket_view": True}}
"""What is resolved from auto."""


def cell(device="cpu", sharding="ddp", accumulation_steps=1):
    return SimpleNamespace(
        resources=SimpleNamespace(device=device),
        sharding=choice("sharding", sharding, **VALUES.get(sharding, {})),
        batch=SimpleNamespace(accumulation_steps=accumulation_steps),
    )


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
def test_compiled_gradients_equal_those_of_the_plain_model(name, memory):
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


def test_only_what_compiles_asks_for_a_spawned_process():
    asks = {n: choice("compilation", n).needs_spawn for n in ("eager", "cuda_graphs", *COMPILED)}

    assert asks == {"eager": False, "cuda_graphs": True, **dict.fromkeys(COMPILED, True)}


@pytest.mark.parametrize("name", COMPILED)
def test_a_missing_compiler_is_named(name, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    (reason,) = choice("compilation", name).conflicts(cell())

    assert reason == (
        f"`compilation={name}` needs a C++ compiler on cpu; found no `no-such-compiler -m64`. "
        "Install one (Debian: `apt-get install g++`), name it in CXX, or use `compilation=eager`."
    )
    assert not list(choice("compilation", name).conflicts(cell("cuda")))


def test_cuda_graphs_refuse_what_moves_in_memory():
    def reasons(**kwargs):
        return list(choice("compilation", "cuda_graphs").conflicts(cell(**kwargs)))

    (reason,) = reasons(device="cpu")
    assert "got cpu, which has no CUDA graphs. Use `compilation=compile_blocks`." in reason
    (reason,) = reasons(device="cuda", sharding="fsdp")
    assert "`sharding=fsdp` gathers parameters anew in every step" in reason
    (reason,) = reasons(device="cuda", accumulation_steps=4)
    assert "`batch.accumulation_steps=4` would add to overwritten ones" in reason
    assert not reasons(device="cuda")
