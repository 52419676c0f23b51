"""A sweep written as a bundle: records, tables, claims, figures and code state in one archive."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory

from vitsweep.bundle.anonymous import Anonymizer, anonymizer
from vitsweep.bundle.archive import files_of, is_bundled, write_archive
from vitsweep.bundle.claims import DEFAULT_MARGIN, Claim, as_tree, claims_of
from vitsweep.charts import style
from vitsweep.errors import VitsweepError
from vitsweep.files import read_bytes, read_text, write_atomically
from vitsweep.report.figures import drawn
from vitsweep.report.views import collect
from vitsweep.results.record import RunRecord, parsed_json
from vitsweep.results.store import NAME, Store
from vitsweep.tables.formatting import count
from vitsweep.tables.sweep_tables import SweepTables

FORMAT = 1
VIEWS = ("cells.csv", "replicates.csv")


@dataclass(frozen=True)
class Bundled:
    """What was written.

    Attributes:
        claims: of the bundle.
        notes: what was left out of it, or stays in it.
    """

    claims: list[Claim]
    notes: tuple[str, ...]


def write_bundle(
    store: Store,
    to: Path,
    *,
    drawn_by: str,
    margin: float = DEFAULT_MARGIN,
    anonymous: bool = False,
    hide: Sequence[str] = (),
) -> Bundled:
    """Write a sweep as one archive.

    Tables, figures and claims are made anew from the records. Weights, checkpoints, traces and jobs of a
    cluster stay behind.

    Args:
        store: of the sweep.
        to: the archive.
        drawn_by: hash of the code that draws and counts, see `check`.
        margin: of the claims.
        anonymous: rewrite hosts, users and paths.
        hide: further words to rewrite.

    Raises:
        VitsweepError: nothing was measured, or something cannot be hidden.
        OtherSchemaError: a record is of another schema.
    """
    records = list(store.runs())
    if not records:
        raise VitsweepError(f"Sweep `{store.name}` has no run: there is nothing to claim.")
    hidden = anonymizer(store, records, hide) if anonymous else None
    name = hidden.text(store.name) if hidden else store.name
    if not NAME.fullmatch(name):
        raise VitsweepError(f"A sweep called `{name}` cannot be bundled: rename its folder.")
    notes = [
        f"{count(n, 'damaged record')} of cell {c} left out"
        for c, n in store.damaged_runs().items()
    ]
    with TemporaryDirectory() as place:
        staged = Store(Path(place).resolve() / name).create()
        _copy(store, staged.root, records, hidden)
        tables = collect(staged)
        claims = claims_of(tables.cells, margin)
        _derived(staged.root, tables, claims, drawn_by, hidden)
        for left in set(files_of(staged.root)):
            if not is_bundled(left):
                (staged.root / left).unlink()
        if hidden:
            hidden.require_none(staged.root, files_of(staged.root))
            notes += [
                f"`{word}` is also a setting, and stays outside of paths" for word in hidden.kept
            ]
        write_archive(staged.root, to)
    return Bundled(claims, tuple(notes))


def figures_of(tables: SweepTables) -> dict[str, str]:
    """Return file name -> SVG of every chart of a sweep's report."""
    return {f"figures/{chart.name}.svg": style.to_svg(figure) for chart, figure, _ in drawn(tables)}


def _derived(
    root: Path,
    tables: SweepTables,
    claims: list[Claim],
    drawn_by: str,
    hidden: Anonymizer | None,
) -> None:
    document = {
        "format": FORMAT,
        "anonymous": hidden is not None,
        "drawn_by": f"{drawn_by} matplotlib {version('matplotlib')}",
        "claims": as_tree(claims),
    }
    clean: Callable[[str], str] = hidden.text if hidden else str
    write_atomically(root / "claims.json", clean(json.dumps(document, indent=1)))
    write_atomically(root / "packages.txt", clean(packages()))
    for name, svg in figures_of(tables).items():
        write_atomically(root / name, svg)


def packages() -> str:
    """Return a line `name==version` for every package of this environment, in order."""
    found = {d.metadata["Name"].lower(): d.version for d in distributions() if d.metadata["Name"]}
    return "".join(f"{name}=={number}\n" for name, number in sorted(found.items()))


def _copy(store: Store, to: Path, records: Sequence[RunRecord], hidden: Anonymizer | None) -> None:
    """Copy the intact records of a sweep and what was written beside them."""
    intact = {f"cells/{r.cell_id}/runs/{r.run_id}.json": r for r in records}
    moved: dict[str, str] = {}
    names = [n for n in files_of(store.root) if is_bundled(n) and not n.endswith(".parquet")]
    of_others = [n for n in names if n not in VIEWS and not n.startswith("figures/")]
    for name in sorted(
        of_others, key=lambda n: not n.endswith(".diff")
    ):  # these get new names first
        if "/runs/" in name and name not in intact:
            continue
        if hidden is None:
            write_atomically(to / name, read_bytes(store.root / name), durable=False)
            continue
        text = hidden.text(read_bytes(store.root / name).decode("utf-8", "replace"))
        for before, after in moved.items():
            text = text.replace(before, after)
        place = hidden.text(name)
        if name.endswith(".diff"):
            place = moved[name] = f"code/{sha256(text.encode()).hexdigest()[:12]}.diff"
        elif name in intact:
            text = RunRecord.from_tree(parsed_json(hidden.text(intact[name].to_json()))).to_json()
        write_atomically(to / place, text, durable=False)


def read_document(root: Path) -> dict[str, object]:
    """Return what `claims.json` of a bundle says.

    Raises:
        VitsweepError: it is missing, damaged or of another format.
    """
    try:
        tree = parsed_json(read_text(root / "claims.json"))
    except (OSError, ValueError) as error:
        raise VitsweepError(f"`claims.json` of the bundle cannot be read ({error}).") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise VitsweepError(f"`claims.json` of the bundle is not of format {FORMAT}.")
    return tree
