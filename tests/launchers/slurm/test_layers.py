"""Imports inside `launchers/slurm`: `submit` and `node` use `state`, and there is no circle of files."""

import graphlib

from tests.test_layering import PACKAGE, imports

ROOM = PACKAGE / "launchers" / "slurm"
PREFIX = "vitsweep.launchers.slurm."
ALLOWED = {
    "submit": {"submit", "state", "commands"},
    "node": {"node", "state", "commands"},
    "state": {"state", "commands"},
    "commands": set[str](),
}
"""Folder -> folders from which it may import."""


def imported_modules() -> dict[str, set[str]]:
    """Return module -> modules of this room that it imports, inside functions too."""
    modules = {
        ".".join(path.relative_to(ROOM).with_suffix("").parts): path
        for path in ROOM.rglob("*.py")
        if path.stem != "__init__"
    }
    found = {}
    for module, path in modules.items():
        names = [name.removeprefix(PREFIX) for name in imports(path) if name.startswith(PREFIX)]
        found[module] = {m for m in modules for name in names if f"{name}.".startswith(f"{m}.")}
    return found


def test_only_state_is_shared() -> None:
    found = imported_modules()
    assert len(found) >= 10
    assert any(found.values())
    wrong = {
        (module, other)
        for module, others in found.items()
        for other in others
        if other.split(".")[0] not in ALLOWED[module.split(".")[0]]
    }
    assert wrong == set()


def test_there_is_no_circle_of_files() -> None:
    order = list(graphlib.TopologicalSorter(imported_modules()).static_order())
    assert order.index("state.jobs") < order.index("state.poll")
