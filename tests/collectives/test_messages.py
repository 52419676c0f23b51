"""What ranks tell each other: JSON and tensors of any shape and type, and never a pickle; and when."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vitsweep
from tests.cells import cell
from tests.ranks import on_ranks
from vitsweep.collectives.parallel_linear import _ColumnProduct
from vitsweep.collectives.primitives import from_first, gathered, gathered_tensors
from vitsweep.world import World

PICKLING = re.compile(
    r"(all_gather|gather|broadcast|scatter|send|recv)_object|torch\.load\((?!.*weights_only=True)"
)


def tell(world: World) -> Any:
    value = {"rank": world.rank, "text": "é" * 1000 * world.rank, "nan": np.float64(np.nan)}
    value["count"] = np.int64(2**40 + world.rank)
    parts = {
        "half": torch.full((2, world.rank + 1), 1.5, dtype=torch.bfloat16),
        "number": torch.tensor(world.rank, dtype=torch.int64),
        "complex": torch.tensor([1j * world.rank]),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0),
    }
    told = gathered(value)
    tensors = [{k: v.tolist() for k, v in found.items()} for found in gathered_tensors(parts)]
    return told, tensors, from_first(["rank", world.rank]), from_first(world.rank, rank=1)


def test_values_and_tensors_of_all_ranks_arrive_on_each(tmp_path: Path) -> None:
    both = on_ranks(2, tell, cell("resources.ranks_per_node=2"), folder=tmp_path)
    for told, tensors, first, second in both:
        assert [(found["rank"], len(found["text"])) for found in told] == [(0, 0), (1, 1000)]
        assert [found["count"] - 2**40 for found in told] == [0, 1]
        assert all(np.isnan(found["nan"]) for found in told)
        assert [found["half"] for found in tensors] == [[[1.5]] * 2, [[1.5, 1.5]] * 2]
        assert [found["number"] for found in tensors] == [0, 1]
        assert [found["complex"] for found in tensors] == [[0j], [1j]]
        assert {str(found["flags"]) for found in tensors} == {"[True, False]"}
        assert (first, second) == (["rank", 0], 1)


def test_no_module_unpickles_what_another_rank_sends() -> None:
    folder = Path(vitsweep.__file__).parent
    found = [str(p) for p in folder.rglob("*.py") if PICKLING.search(p.read_text())]
    assert found == []


def test_one_process_tells_itself() -> None:
    assert gathered({"a": 1}) == [{"a": 1}]
    assert from_first((1, 2)) == (1, 2)


def test_gradients_of_inputs_are_summed_while_those_of_weights_are_multiplied() -> None:
    order: list[str] = []

    class Boundary:
        def gather(self, x: Tensor) -> Tensor:
            return x

        def start_sum(self, partial: Tensor) -> Callable[[], Tensor]:
            order.append("the sum begins")
            return lambda: order.append("it is waited for") or partial

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            order.extend(["product"] * (func is torch.ops.aten.mm.default))
            return func(*args, **(kwargs or {}))

    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 4), (5, 4), (5,)))
    y = _ColumnProduct.apply(x, weight, bias, Boundary())
    with Products():
        y.sum().backward()
    assert order == ["product", "the sum begins", "product", "it is waited for"]
