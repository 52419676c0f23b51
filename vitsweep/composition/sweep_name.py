"""The folder of a command that has no `sweep.name`: model, data, and the keys that vary."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from hydra.core.override_parser.types import Override

from vitsweep.composition.composer import OUTSIDE_THE_CELL, ComposedCell, Composer, root_of
from vitsweep.spec.cell_spec import GROUPS

AUTO = "auto"
"""`sweep.name` of a command that leaves the name to vitsweep."""

MOST_KEYS = 6
"""More keys than this are counted instead of named."""


def named(
    cells: Sequence[ComposedCell], composer: Composer, swept: Collection[str] = ()
) -> list[ComposedCell]:
    """Return the cells with `sweep.name` set in their trees, where it was left to vitsweep.

    Args:
        cells: of one command.
        composer: knows the groups and their defaults.
        swept: keys that vary although these cells do not show it.
    """
    if not cells or cells[0].tree["sweep"]["name"] != AUTO:
        return list(cells)
    name = automatic_name(cells, composer, swept)
    return [
        replace(cell, tree=cell.tree | {"sweep": cell.tree["sweep"] | {"name": name}})
        for cell in cells
    ]


def automatic_name(
    cells: Sequence[ComposedCell], composer: Composer, swept: Collection[str] = ()
) -> str:
    """Return the name of a folder, such as `vit_nano-precision-sharding`.

    The values of the keys are not part of it, so that a wider grid continues in the same folder.
    Keys of techniques count wherever they are set: they vary between a cell and its baseline. Data
    are named where they are not the default.
    """
    parsed = [composer.parse(cell.overrides) for cell in cells]
    values = [{_key(o): str(o.input_line).partition("=")[2] for o in each} for each in parsed]
    roots = {_key(o): root_of(o) for each in parsed for o in each}
    varying = [key for key, root in roots.items() if _varies(key, root, values, swept)]
    groups = list(composer.default_choices)
    place = {
        key: groups.index(roots[key]) if roots[key] in groups else len(groups) for key in varying
    }
    names = [key.rpartition(".")[2] for key in sorted(varying, key=lambda k: (place[k], k))]
    names = [name for name in dict.fromkeys(names) if name not in ("model", "data")]
    more = [f"{len(names) - MOST_KEYS}_more"] if len(names) > MOST_KEYS else []
    limit_key = cells[0].tree["sweep"]["limit"]["key"]
    searched = [f"limit_of_{limit_key.rpartition('.')[2]}"] if limit_key else []
    return "-".join([*_subjects(cells, composer), *names[:MOST_KEYS], *more, *searched])


def _subjects(cells: Sequence[ComposedCell], composer: Composer) -> Iterator[str]:
    """Yield the model, and the data if they are not the default; the group where several vary."""
    for group in ("model", "data"):
        choices = {
            str(cell.choices.get(group, group)) for cell in cells
        }  # `~model` is refused later
        if len(choices) > 1:
            yield group
        elif group == "model" or choices != {composer.default_choices[group]}:
            yield from choices


def _varies(
    key: str, root: str, values: Sequence[Mapping[str, str]], swept: Collection[str]
) -> bool:
    if root in (*OUTSIDE_THE_CELL, "hydra"):
        return False
    differs = len({cell.get(key) for cell in values}) > 1
    return differs or key in swept or root in (*GROUPS, "mesh")


def _key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~")
