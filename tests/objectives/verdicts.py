"""What the proof says of cells on ranks, and of objectives with a planted fault."""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from tests.cells import TINY, entry
from tests.ranks import on_ranks, placed
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.prove import prove
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.rules import conflicts
from vitsweep.world import World


def asked(*overrides: str, ranks: int = 2) -> CellSpec:
    """Return a tiny cell that nothing refuses."""
    spec = entry(*TINY, f"resources.ranks_per_node={ranks}", *overrides).spec
    assert not conflicts(spec), conflicts(spec)
    return spec


def verdicts(
    specs: list[CellSpec], folder: Path, plants: list[Callable[[], object]] | None = None
) -> list[str]:
    """Return `equal`, or what differs, of cells of as many ranks; all ranks say so.

    Args:
        specs: cells.
        folder: for answers.
        plants: what is broken in the ranks before each of them, and stays so.
    """
    ranks = specs[0].resources.ranks_per_node
    answers = on_ranks(ranks, _verdicts, specs[0], specs, plants or [], folder=folder, seconds=550)
    assert all([told[:40] for told in one] == [told[:40] for told in answers[0]] for one in answers)
    return list(answers[0])


def _verdicts(world: World, specs: list[CellSpec], plants: list[Callable[[], object]]) -> list[str]:
    found = []
    for spec, plant in zip_longest(specs, plants):
        if plant:
            plant()
        try:
            prove(spec, placed(world, spec))
            found.append("equal")
        except WrongResultError as error:
            found.append(str(error))
    return found
