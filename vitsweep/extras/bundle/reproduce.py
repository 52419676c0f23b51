"""The claims of a bundle measured again on this machine, in fresh blocks."""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.composer import Composer
from vitsweep.composition.frozen import typed_words
from vitsweep.console import print_lines
from vitsweep.errors import SweepStopped, VitsweepError
from vitsweep.extras.bundle.claims import Claim, Verdict
from vitsweep.extras.compare.comparison import Comparison
from vitsweep.extras.compare.measure import StopReason, compared_settings
from vitsweep.extras.compare.pair import ComparisonRequest, plan_pair
from vitsweep.planning.sweep_plan import PlannedCell, plan_cell
from vitsweep.results.provenance import require_trust
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.free_text import free_text
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import ratio

NOT_OF_A_CELL = ("sweep", "tracker", "hydra")
"""Groups of overrides that say where results go."""
OF_A_MACHINE = (
    "resources.", "mesh.", "measurement", "half_dtype", "world_size", "nodes", "ranks_per_node",
    "precision.half_dtype",
)  # fmt: skip
"""Beginnings of columns that a machine decides where they are left to it."""
NOTHING = Comparison(nan, nan, nan, 0)


@dataclass(frozen=True)
class Reproduction:
    """What new blocks say of one claim.

    Attributes:
        claim: of the bundle.
        result: the ratio here, with the 95 % interval of `compare`.
        verdict: of the claim.
        note: why nothing was measured, or what this machine set otherwise.
    """

    claim: Claim
    result: Comparison = NOTHING
    verdict: Verdict = Verdict.not_measured
    note: str = ""


def require_own_or_trusted(store: Store, claims: Sequence[Claim], archive: Path) -> None:
    """Stop at free text of another's cells without `--trust`.

    Raises:
        VitsweepError: somebody else froze a cell with free text, and there is no `--trust`.
    """
    cells = sorted({c for claim in claims for c in (claim.cell_id, claim.baseline_cell_id)})
    others = [cell for cell in cells if not _is_own(store, cell)]
    texts = [text for cell in others for text in free_text(store.frozen(cell)["cell"])]
    require_trust(archive, texts)


def _is_own(store: Store, cell_id: str) -> bool:
    try:
        return store.is_own_cell(cell_id)
    except OSError:
        return False


def reproduce(
    store: Store,
    claims: Sequence[Claim],
    minutes: float,
    console: Console,
    ended: Callable[[Reproduction], None],
) -> tuple[list[Reproduction], Path | None]:
    """Run the cells of each claim here, in turns with their baseline, until its interval is narrow.

    Args:
        store: the sweep folder of a bundle without faults.
        claims: that its records make.
        minutes: for all claims together; each gets an equal part of what is left.
        console: for progress.
        ended: is called with each claim that is judged.

    Returns:
        A row per claim, and the sweep folder of the new runs; None where nothing ran.

    Raises:
        SweepStopped: the user stopped it.
    """
    composer, machine = Composer(), Machine.here()
    name, end = _folder(store, claims), time.monotonic() + 60 * minutes
    found: list[Reproduction] = []
    folder: Path | None = None
    for number, claim in enumerate(claims):
        left = (end - time.monotonic()) / 60 / (len(claims) - number)
        claimed = ratio(claim.ratio, claim.low, claim.high)
        print_lines(console, ["", f"{claim.cell}: {claimed} is claimed."])
        try:
            one, folder = _reproduced(
                store, claim, name, max(left, 1e-3), composer, machine, console
            )
        except SweepStopped:
            raise
        except VitsweepError as error:
            one = Reproduction(claim, note=str(error))
        found.append(one)
        ended(one)
    return found, folder


def _folder(store: Store, claims: Sequence[Claim]) -> str:
    """Name a folder for these claims alone, so that no earlier block enters."""
    text = f"{claims} {Machine.here()}"
    return f"reproduce-{store.name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _reproduced(
    store: Store,
    claim: Claim,
    name: str,
    minutes: float,
    composer: Composer,
    machine: Machine,
    console: Console,
) -> tuple[Reproduction, Path]:
    ids = (claim.cell_id, claim.baseline_cell_id)
    typed = typed_words(store, ids, exactly=False)
    sides = [_overrides(typed[cell]) for cell in ids]
    notes = [_differences(store, i, s, composer, machine) for i, s in zip(ids, sides, strict=True)]
    request = ComparisonRequest(
        variant=tuple(sides[0]),
        baseline=tuple(sides[1]),
        common=("machine=cpu", f"sweep.name={name}", "sweep.prune_slowdown=null"),
        width=claim.margin / 2,
        minutes=minutes,
    )
    with compared_settings(plan_pair(request), console) as (launched, pair):
        if launched.interrupted:
            raise SweepStopped
        result, root = pair.comparison, pair.folder
        verdict = claim.verdict(result)
        if pair.stop_reason is StopReason.not_measured:
            verdict = Verdict.not_measured
    return Reproduction(claim, result, verdict, "; ".join(filter(None, dict.fromkeys(notes)))), root


def _overrides(words: Sequence[str]) -> list[str]:
    """Return what makes a cell, without where its results went."""
    groups = {word: re.split("[./=]", word.lstrip("+~"))[0] for word in words}
    return [word for word, group in groups.items() if group not in NOT_OF_A_CELL]


def _differences(
    store: Store, cell_id: str, overrides: Sequence[str], composer: Composer, machine: Machine
) -> str:
    """Say what this machine sets otherwise in a cell.

    Raises:
        VitsweepError: the overrides make another cell than the one that was measured.
    """
    entry: PlannedCell = plan_cell(composer.compose(list(overrides)), machine)
    if entry.cell_id == cell_id:
        return ""
    there = next(store.runs(cell_id)).spec
    here = flatten(entry.spec)
    other = [k for k in there if k in here and there[k] != here[k] and "***" not in str(there[k])]
    if wrong := [key for key in other if not key.startswith(OF_A_MACHINE)]:
        said = ", ".join(f"`{key}={here[key]}` instead of {there[key]}" for key in wrong[:5])
        raise VitsweepError(
            f"What was typed for cell {cell_id} makes another cell here: {said}. Its defaults may have "
            "changed since; the vitsweep of the bundle makes the same."
        )
    return ", ".join(f"{key} {here[key]} (there {there[key]})" for key in other)


def as_table(rows: Sequence[Reproduction]) -> DataFrame:
    """Return a row per claim, as text."""

    return DataFrame(
        [
            {
                "cell": row.claim.cell,
                "claimed": ratio(row.claim.ratio, row.claim.low, row.claim.high),
                "margin": f"{100 * row.claim.margin:.3g} %",
                "here": str(row.result),
                "blocks": row.result.num_blocks,
                "verdict": str(row.verdict),
            }
            for row in rows
        ]
    )
