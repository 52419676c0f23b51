"""The proof finds faults that an implementation of flow matching may have."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.objectives.test_flow_matching import TEXT, cell
from tests.techniques.sequence_parallel.cases import answers
from vitsweep.collectives.parallel_linear import TokenSharded
from vitsweep.objectives import stdit
from vitsweep.objectives.velocity import Velocity
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.sequence_parallel import token_sharding
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

RING = (*TEXT, "sequence_parallel=ring", "sequence_parallel.order=zigzag", "attention=sdpa_causal")
MEGATRON_SP = (*TEXT, "sequence_parallel=megatron_sp")
TENSOR = (*TEXT, "tensor_parallel=megatron")


def around(owner: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """Give what is right to `wrong`, with the arguments."""
    right = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **named: wrong(right(*args, **named), *args))


def time_of_a_rank() -> Any:
    def moved(step: Any, trainer: Trainer, *_: Any) -> Any:
        return replace(step, seed=step.seed + trainer.world.rank)

    return around(Trainer, "at", moved)


def modulation_not_summed() -> Any:
    return patch.object(TokenSharded, "beside_tokens", lambda self, x: x)


def norms_of_queries_and_keys_not_summed() -> Any:
    return patch.object(stdit, "copy_to_tensor_parallel", lambda x, group: x)


def velocity_negated() -> Any:
    return around(Velocity, "prepare", lambda found, *_: {**found, "velocity": -found["velocity"]})


def text_of_the_neighbour() -> Any:
    def rolled(found: dict[str, Any], *_: Any) -> dict[str, Any]:
        return found | {"text": found["text"].roll(1, 0)}

    return around(Velocity, "condition", rolled)


def angles_in_another_order() -> Any:
    right = token_sharding.to_zigzag

    def wrong(x: Tensor, *given: Any) -> Tensor:
        return x if x.ndim == 2 else right(x, *given)  # cosines and sines (X, K)

    return patch.object(token_sharding, "to_zigzag", wrong)


FAULTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "time of a rank": (time_of_a_rank, RING),
    "velocity's sign": (velocity_negated, RING),
    "text of the neighbour": (text_of_the_neighbour, RING),
    "angles in another order": (angles_in_another_order, RING),
    "modulation not summed": (modulation_not_summed, MEGATRON_SP),
    "norms of q and k not summed": (norms_of_queries_and_keys_not_summed, TENSOR),
}


def told(world: World, cells: list[CellSpec]) -> list[dict[str, str]]:
    found = []
    for each in cells:
        said = {"none": _told(each, world)}
        for name, (fault, words) in FAULTS.items():
            if cell(2, *words).cell_id == each.cell_id:
                with fault():
                    said[name] = _told(each, world)
        found.append(said)
    return found


def _told(each: CellSpec, world: World) -> str:
    try:
        prove(each, world)
    except WrongResultError as wrong:
        return str(wrong)
    return ""


@pytest.mark.slow
def test_faults_of_flow_matching_are_found(tmp_path: Path) -> None:
    seen = {}
    for _, said in answers(
        told, [cell(2, *words) for words in (RING, MEGATRON_SP, TENSOR)], tmp_path
    ):
        assert said.pop("none") == ""
        seen |= said
    assert {*seen} == {*FAULTS}
    assert all(seen.values()), seen
