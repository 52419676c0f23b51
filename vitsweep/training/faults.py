"""Where a training leaves the plain one, and which of its choices may be at fault."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import class_of, plain_choice
from vitsweep.spec.technique import PHASES
from vitsweep.training.twin import exact_twin


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
"""Groups whose plain choice does something too."""


class WrongResultError(VitsweepError):
    """A cell trained with its techniques has other losses than plain training."""


def agree(faults: Sequence[tuple[Place, str]], when: str, twin: CellSpec) -> None:
    """Raise on all ranks the first of the faults that some rank found."""
    own = next(((number, text) for number, (_, text) in enumerate(faults) if text), None)
    found = [(*fault, rank) for rank, fault in enumerate(gathered(own)) if fault]
    if not found:
        return
    number, text, rank = min(found, key=lambda fault: (fault[0], fault[2]))
    place = faults[number][0]
    suspects = ", ".join([*_touching(twin, place), "this hardware"])
    raise WrongResultError(
        f"The nano twin's {text} {when} in {twin.precision.name} (rank {rank}). It shows first "
        f"{place.words}: {' or '.join(suspects.rsplit(', ', 1))} computes something else."
    )


def _touching(twin: CellSpec, place: Place) -> list[str]:
    """Return the choices that change what is computed there, as typed."""
    found = []
    for group, choice in twin.techniques.items():
        plain = plain_choice(group)
        is_plain = (choice.name, type(choice)) == (plain, class_of(group, plain))
        is_exact = group == "precision" and choice == exact_twin(twin).precision
        does_nothing = choice.name == "none" or is_exact or (is_plain and group not in ACTING)
        if not does_nothing and group in place.groups and {*place.phases} & {*choice.touches}:
            found.append(f"`{group}={choice.name}`")
    if "backward" in place.phases and (limit := twin.optimizer.clip_norm) is not None:
        found.append(f"`optimizer.clip_norm={limit:g}`")
    return found
