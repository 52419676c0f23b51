"""A rank whose part of the tokens has another length than the others' says so and sends nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import on_ranks
from tests.refusals import named
from tests.techniques.sequence_parallel.cases import cell
from vitsweep.collectives.parallel_linear import TokenSharded
from vitsweep.collectives.resharding import gather, switch
from vitsweep.measure.communication import counted_bytes
from vitsweep.model.attention import attend
from vitsweep.model.linear_attention import LinearAttend
from vitsweep.techniques.sequence_parallel.linear_states import by_states
from vitsweep.techniques.sequence_parallel.ring_attention import ring_in_place_of
from vitsweep.techniques.sequence_parallel.wrapped_attention import over_heads
from vitsweep.world import World

TOKENS = 17
"""Nine on each of two ranks, one of them padding."""


def qkv(tokens: int) -> list[Tensor]:
    return [torch.zeros(1, 4, tokens, 8) for _ in range(3)]


def told(world: World, tokens: int) -> dict[str, str]:
    """What each method says to so many tokens on this rank, and how much it sent before."""
    group = world.axis("replicate").get_group()
    linear = LinearAttend(True, 0.9)
    x = torch.zeros(1, tokens, 32)
    methods = {
        "gather": lambda: gather(x, 1, TOKENS, group),
        "switch": lambda: switch(x.unsqueeze(2), 1, 2, TOKENS, group),
        "ulysses": lambda: over_heads(attend, TOKENS, group)(*qkv(tokens)),
        "ring": lambda: ring_in_place_of(attend, TOKENS, 18, group, zigzag=False)(*qkv(tokens)),
        "lasp": lambda: by_states(linear, TOKENS, group, chain=True)(*qkv(tokens)),
        "lasp2": lambda: by_states(linear, TOKENS, group, chain=False)(*qkv(tokens)),
        "megatron_sp": lambda: TokenSharded(group, 1, TOKENS).gather(x),
    }
    answers = {}
    for name, method in methods.items():
        with counted_bytes() as sent:
            try:
                method()
                answers[name] = "fine"
            except ValueError as error:
                answers[name] = str(error)
        answers[f"{name} sent"] = str(bool(sent.by_collective))
    return answers


def of_each_rank(world: World) -> dict[str, str]:
    """The first rank is not asked where the second would leave it waiting."""
    both = told(world, 9)
    alone = told(world, 8) if world.rank else {}
    return {f"9 {k}": v for k, v in both.items()} | {f"8 {k}": v for k, v in alone.items()}


@pytest.mark.slow
def test_a_part_of_another_length_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    _, second = on_ranks(2, of_each_rank, cell(2), folder=tmp_path)
    for name in ("gather", "switch", "ulysses", "ring", "lasp", "lasp2", "megatron_sp"):
        assert second[f"9 {name}"] == "fine"
        assert second[f"9 {name} sent"] == str(name != "lasp"), "a chain ends at the last rank"
        assert second[f"8 {name} sent"] == "False"
        sentence = second[f"8 {name}"]
        assert "8 positions on rank 1" in sentence, name
        assert {"2", "9", "`resharding.split`"} <= named(sentence)
