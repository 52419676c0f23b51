"""What to type for a frozen cell: as this user typed it, or written anew from what somebody else froze."""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache

from vitsweep.composition.composer import Composer, Tree
from vitsweep.composition.hydra import key_of, value_override
from vitsweep.errors import VitsweepError
from vitsweep.results.provenance import require_trust
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import foreign_functions, own_definitions
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.free_text import choice_of, free_text
from vitsweep.spec.from_yaml import cell_from_tree, hints_of
from vitsweep.spec.resolve import AUTO, resolve
from vitsweep.spec.resources import Machine

OF_THE_MACHINE = ("resources.cores_per_node", "resources.devices_per_node", "mesh.replicate")
"""Settings that nobody types: they follow from the machine and from the others."""
_OLD_WORDS = {r"^sweep\.objective=": "sweep.rank_by=", r"^model\.(loss(_count)?)=": r"++model.\1="}
"""What was typed otherwise when a cell was frozen -> what composes it now, with its id."""


def typed_words(
    store: Store, cells: Iterable[str], *, exactly: bool = True
) -> dict[str, list[str]]:
    """Return the overrides of cells of a sweep, those of the sweep included.

    What somebody else typed is never composed: their cells are written as choices of the menu and values.

    Args:
        store: of the sweep.
        cells: their ids.
        exactly: see `words_of`.

    Raises:
        VitsweepError: a file is missing or damaged; or somebody else froze free text, all of which is named,
            and there is no `--trust`.
    """
    frozen = {cell_id: store.frozen_by(cell_id) for cell_id in cells}
    foreign = {c: document["cell"] for c, (document, is_own) in frozen.items() if not is_own}
    baselines = {c: b for c, b in store.baselines().items() if c in foreign}
    others: dict[str | None, Tree] = {}
    for baseline in {*filter(None, baselines.values())}:
        with suppress(VitsweepError):  # it is missing: the default one is taken
            others[baseline] = store.frozen(baseline)["cell"]
    if foreign:
        texts = [text for tree in [*foreign.values(), *others.values()] for text in free_text(tree)]
        require_trust(store.root, [*texts, *foreign_functions(store, own_definitions(store))])
    words = {}
    for cell_id, (document, is_own) in frozen.items():
        if is_own:
            words[cell_id] = document["overrides"]
            for old, new in _OLD_WORDS.items():
                words[cell_id] = [re.sub(old, new, word) for word in words[cell_id]]
            continue
        words[cell_id] = words_of(foreign[cell_id], exactly=exactly)
        noted = baselines.get(cell_id, "")
        if noted is None:
            words[cell_id] += ["sweep.baseline=null"]
        elif noted in others:
            own = [w for w in words_of(others[noted]) if key_of(w).split(".")[0] in GROUPS]
            words[cell_id] += [value_override("sweep.baseline", own)] if own else []
    return words


def words_of(tree: Tree, *, exactly: bool = True) -> list[str]:
    """Return overrides that compose a frozen tree: a choice of each group, and what it has otherwise.

    Args:
        tree: of a frozen cell.
        exactly: name ranks, device, threads and mesh; False leaves to the machine what was left to one.

    Raises:
        BadValueError: a value is not allowed.
        VitsweepError: the menu here makes another cell of them.
    """
    cell_from_tree(tree)  # says what is missing or wrong
    parts = {name: tree[name] for name in hints_of(CellSpec)}
    choices = {g: choice_of(g, node) for g, node in parts.items() if isinstance(node, dict)}
    default = _menu().default_choices
    words = [f"{g}={choice}" for g, choice in choices.items() if choice not in (None, default[g])]
    plain = _menu().compose(words).tree
    words += _differences(parts, plain, plain, ("resources", "mesh") if exactly else ())
    words += _differences(parts, _resolved(words, parts), plain)
    if left := _differences(parts, _resolved(words, parts), plain):
        raise VitsweepError(
            "The menu of the vitsweep installed here makes another cell of one that somebody else froze: it "
            f"lacks {', '.join(f'`{word}`' for word in left[:5])}. Use the version that froze it."
        )
    return words


@cache
def _menu() -> Composer:
    """Return the composer over the installed `conf/`: no folder of anybody adds to it."""
    return Composer()


def _resolved(words: list[str], parts: Tree) -> Tree:
    """Compose, with every `auto` as on the machine where the cell was frozen."""
    cores, gpus = (parts["resources"][f"{name}_per_node"] for name in ("cores", "devices"))
    return resolve(
        _menu().compose(words).tree,
        Machine(device="cuda" if gpus else "cpu", cores_per_node=cores, devices_per_node=gpus),
    )


def _differences(
    parts: Tree, base: Tree, plain: Tree, named: Collection[str] | None = None
) -> list[str]:
    """Return the overrides that make `parts` of `base`, which was composed over `plain`.

    Args:
        parts: of a frozen cell.
        base: a composed configuration.
        plain: the same with choices alone, for the keys that need no `++`.
        named: groups of which an `auto` in `base` is replaced; None for all.
    """
    words = [] if parts["seed"] == base["seed"] else [value_override("seed", parts["seed"])]
    for group, node in parts.items():
        for key, value in node.items() if isinstance(node, dict) else ():
            known, name = base[group].get(key, AUTO), f"{group}.{key}"
            is_left = known == AUTO and named is not None and group not in named
            if value != known and not is_left and name not in OF_THE_MACHINE:
                adds = key not in plain[group] or key == "name" or isinstance(value, dict)
                words.append(value_override(f"++{name}" if adds else name, value))
    return words
