"""How far two trainings differ, where that shows first, and which choices may be at fault."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.proof.twin import CLIP, exact_twin
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import class_of, plain_choice
from vitsweep.spec.technique import PHASES
from vitsweep.training.shards import Named

# Distances of tensors, by name and norm.


def norms_of(tensors: Named) -> dict[str, float]:
    """Return name -> L2 norm, computed in float64 and read at once."""
    if not tensors:
        return {}
    norms = torch.stack([wide(t.detach()).norm() for t in tensors.values()])
    return dict(zip(tensors, norms.tolist(), strict=True))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in complex128."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def typical_norm(norms: dict[str, float]) -> float:
    """Return the root mean square."""
    return (sum(n * n for n in norms.values()) / len(norms)) ** 0.5


def minus(these: Named, those: Named) -> Named:
    """Return differences by the names of `those`, in float64; what is missing counts as zero."""
    return {
        n: (wide(these[n].reshape(t.shape)) if n in these else 0) - wide(t)
        for n, t in those.items()
    }


def furthest(
    what: str, apart: dict[str, float], bounds: dict[str, float], norms: dict[str, float]
) -> str:
    """Say which tensor is furthest outside of its bound; "" where none is."""
    outside = {n: d for n, d in apart.items() if not d <= bounds[n]}  # a NaN is outside
    if not outside:
        return ""
    name = max(outside, key=lambda n: outside[n] / (bounds[n] or 1e-300))
    size = norms[name] or 1.0
    return (
        f"{what} of `{name}` differs from the reference's by {outside[name] / size:.3g} of its norm (L2), "
        f"where rounding explains {bounds[name] / size:.3g} at most,"
    )


# Where a difference shows, and the message.


@dataclass(frozen=True)
class Place:
    """Where a difference shows first.

    Attributes:
        words: for the message.
        phases: of a step; the choices that touch one of them may be at fault.
        groups: of these choices.
    """

    words: str
    phases: Sequence[str] = PHASES[1:]  # the twin reads no data
    groups: Collection[str] = tuple(GROUPS)


START = Place("in what training begins with")
MODULE = Place("in the module of your own without techniques", groups=("precision",))
FORWARD = Place("in the forward pass", ("forward",))
BACKWARD = Place("in the backward pass, where the loss agrees", ("backward",))
EITHER = Place(
    "in the forward or the backward pass, by less than the loss shows", ("forward", "backward")
)
UPDATE = Place("in the update, where loss and gradients agree", ("optimizer",))
ALONE = Place("in the optimizer alone", ("optimizer",), ("optimizer",))
ACTING = ("sharding", "optimizer")
"""Groups whose default choice does something too."""


class WrongResultError(VitsweepError):
    """A cell trained with its techniques has other losses than reference training.

    Attributes:
        found: what differs, and where it shows first.
        twin: which of the twins differs.
        suspects: group, or `CLIP` -> as typed, of the choices that may be at fault.
    """

    found: str
    twin: CellSpec
    suspects: Mapping[str, str]


def wrong_result(
    found: str, twin: CellSpec, suspects: Mapping[str, str], *, is_sure: bool = False
) -> WrongResultError:
    """Return an error that names the suspects, and the hardware unless the twin agrees without them."""
    names = [*suspects.values(), *["this hardware"] * (not is_sure)]
    listed = " or ".join(", ".join(names).rsplit(", ", 1))
    without = ", and without it the twin agrees" * is_sure
    error = WrongResultError(f"{found}: {listed} computes something else{without}.")
    error.found, error.twin, error.suspects = found, twin, suspects
    return error


def agree(faults: Sequence[tuple[Place, str]], when: str, twin: CellSpec) -> None:
    """Raise on all ranks the first of the faults that some rank found."""
    own = next(((number, text) for number, (_, text) in enumerate(faults) if text), None)
    found = [(*fault, rank) for rank, fault in enumerate(gathered(own)) if fault]
    if not found:
        return
    number, text, rank = min(found, key=lambda fault: (fault[0], fault[2]))
    place = faults[number][0]
    raise wrong_result(
        f"The nano twin's {text} {when} in {twin.precision.name} (rank {rank}). It shows first {place.words}",
        twin,
        _touching(twin, place),
    )


def _touching(twin: CellSpec, place: Place) -> dict[str, str]:
    """Return the choices that change what is computed there, as typed."""
    found = {}
    for group, choice in twin.techniques.items():
        plain = plain_choice(group)
        is_plain = (choice.name, type(choice)) == (plain, class_of(group, plain))
        is_exact = group == "precision" and choice == exact_twin(twin).precision
        does_nothing = choice.name == "none" or is_exact or (is_plain and group not in ACTING)
        if not does_nothing and group in place.groups and {*place.phases} & {*choice.touches}:
            found[group] = f"`{group}={choice.name}`"
    if "backward" in place.phases and (limit := twin.optimizer.clip_norm) is not None:
        found[CLIP] = f"`{CLIP}={limit:g}`"
    return found
