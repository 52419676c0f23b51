"""Techniques as users write them, with a fault in their rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vitsweep.spec.technique import Memory


@dataclass(frozen=True, kw_only=True)
class Mumbles(Memory):
    """Refuses every cell, with no sentence."""

    def apply(self, model: Any) -> Any:
        return model

    def conflicts(self, cell: Any) -> Iterator[str]:
        yield "no"


@dataclass(frozen=True, kw_only=True)
class NeedsMore(Mumbles):
    """Refuses every cell, with a sentence that does not name it."""

    def conflicts(self, cell: Any) -> Iterator[str]:
        yield "This memory technique needs `resources.nodes=99` or more of them."


@dataclass(frozen=True, kw_only=True)
class OneRank(Mumbles):
    """Refuses cells of several ranks, the default on many machines."""

    def conflicts(self, cell: Any) -> Iterator[str]:
        if cell.resources.world_size > 1:
            yield "This memory technique needs one rank: use `resources.ranks_per_node=1`."


@dataclass(frozen=True, kw_only=True)
class Raises(Mumbles):
    def conflicts(self, cell: Any) -> Iterator[str]:
        raise KeyError("x")


@dataclass(frozen=True, kw_only=True)
class RaisesHere(Mumbles):
    def conflicts(self, cell: Any) -> Iterator[str]:
        return iter(())

    def lacking_here(self, cell: Any) -> Iterator[str]:
        raise OSError("no such device")


@dataclass(frozen=True, kw_only=True)
class RaisesBesideFsdp(Mumbles):
    def conflicts(self, cell: Any) -> Iterator[str]:
        if cell.sharding.name == "fsdp":
            raise KeyError("x")
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Counts(Mumbles):
    """Gives no texts."""

    def conflicts(self, cell: Any) -> Iterator[Any]:
        yield 3


@dataclass(frozen=True, kw_only=True)
class RaisesElsewhere(Mumbles):
    """Raises in a property that rules of vitsweep's read."""

    @property
    def axes(self) -> tuple[str, ...]:
        raise ZeroDivisionError("of its own")
