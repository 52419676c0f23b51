"""What a bundle claims: ratios with their intervals, each with a margin in which others find it again."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.extras.compare.comparison import Comparison
from vitsweep.foreign import foreign
from vitsweep.results.record import Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.tables.formatting import count, missing
from vitsweep.tables.names import cell_names
from vitsweep.tables.render import ranked
from vitsweep.tables.sweep_tables import SweepTables

MARGIN, LARGEST_MARGIN = 0.1, 1.0
"""Of a claim, relative: at least the first, at most the second."""
FORMAT = 3


class Verdict(StrEnum):
    """What a new measurement says of a claim."""

    reproduced = "reproduced"
    not_reproduced = "not reproduced"
    too_noisy = "too noisy to say"
    not_measured = "not measured"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A ratio of throughputs over the baseline, as a table has it.

    Attributes:
        cell_id: what is compared.
        baseline_cell_id: what it is compared with.
        cell: the cell in words.
        device: on which both ran.
        ratio: of their throughputs.
        low: lower end of the 95 % interval.
        high: upper end.
        num_pairs: blocks that hold both.
        claim: `stats.Claim` among all cells of the question.
        margin: relative; others reproduce the claim within ratio / (1 + margin) and ratio x (1 + margin).
    """

    cell_id: str
    baseline_cell_id: str
    cell: str
    device: str
    ratio: float
    low: float
    high: float
    num_pairs: int
    claim: str
    margin: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative, to the further end."""
        return max(self.high / self.ratio, self.ratio / self.low) - 1

    def verdict(self, found: Comparison) -> Verdict:
        """Judge the claim by the interval over new blocks.

        The margin is at least the half width of the claim's own interval. So a true claim is *not
        reproduced* only where both intervals together miss the truth: in fewer than 1 of 20 laboratories.
        """
        inside = found.lies_within(self.ratio / (1 + self.margin), self.ratio * (1 + self.margin))
        if inside is None:
            return Verdict.too_noisy
        return Verdict.reproduced if inside else Verdict.not_reproduced


def claims_of(cells: DataFrame) -> list[Claim]:
    """Return a claim for each measured cell that has an interval over its baseline, the fastest first.

    An interval wider than a factor of 2 claims nothing.

    Args:
        cells: one row per cell.
    """
    if not {"speedup_low", "baseline_cell_id"} <= set(cells.columns):
        return []
    named = cells.assign(cell=cell_names(cells))
    kept = named[
        (named["status"] == Status.measured)
        & named["speedup_low"].notna()
        & (named["cell_id"] != named["baseline_cell_id"])
    ]
    rows = ranked(kept).to_dict("records") if len(kept) else []
    found = [_claim(row) for row in rows]
    return [claim for claim in found if claim.margin <= LARGEST_MARGIN]


def _claim(row: Mapping[Any, Any]) -> Claim:
    ratio, low, high = (float(row[c]) for c in ("speedup", "speedup_low", "speedup_high"))
    claim = Claim(
        cell_id=row["cell_id"],
        baseline_cell_id=row["baseline_cell_id"],
        cell=row["cell"],
        device="" if missing(row.get("device")) else str(row["device"]),
        ratio=ratio,
        low=low,
        high=high,
        num_pairs=int(row["num_pairs"]),
        claim=str(row["claim"]),
        margin=MARGIN,
    )
    return replace(claim, margin=max(MARGIN, claim.half_width))


def as_document(claims: Iterable[Claim]) -> dict[str, Any]:
    """Return claims as JSON has them: numbers to six digits, which other versions of numpy agree on."""
    rows = [
        {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(c).items()}
        for c in claims
    ]
    return {"format": FORMAT, "margin": MARGIN, "claims": rows}


def check(store: Store) -> tuple[list[Claim], list[str]]:
    """Return the claims that the records of an extracted bundle make, and what `claims.json` says otherwise.

    Raises:
        VitsweepError: `claims.json` is missing, damaged or of another format.
    """
    try:
        said = foreign(store.root / "claims.json")
    except (OSError, ValueError) as error:
        raise VitsweepError(f"`claims.json` is not readable ({error}): pack it again.") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise VitsweepError(f"`claims.json` must have `format={FORMAT}`: pack it again.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRecordWarning)  # a damaged record is a fault
        made = claims_of(SweepTables.of(store).cells)
    faults = [
        f"{count(n, 'record')} of cell {c} cannot be read." for c, n in store.damaged_runs().items()
    ]
    if said != as_document(made):
        faults.append("`claims.json` is not what the records say.")
    return made, faults
