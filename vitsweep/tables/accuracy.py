"""Is a setting no less accurate than its baseline? A non-inferiority test over paired repetitions.

A difference that is not significant shows nothing: with few seeds hardly any is. What a speedup needs is
the opposite claim, that accuracy is lost by less than a margin, and the evidence for that is an
interval that lies above it (Piaggio et al., JAMA 2012, doi:10.1001/jama.2012.87802).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import missing
from vitsweep.tables.stats import LEVEL, MIN_BLOCKS, Claim, half_width, holm, t_below

MARGIN = 0.005
"""Loss of top-1 that counts as none: 0.5 points."""
COLUMNS = (
    "accuracy_difference accuracy_difference_low accuracy_difference_high accuracy_pairs "
    "accuracy_p_holm accuracy_p_worse_holm accuracy_claim"
).split()
BETTER, NO_WORSE, WORSE = "better", "no worse", "worse"
NOT_SHOWN, TOO_FEW = "not shown", "too few repetitions"


@dataclass(frozen=True)
class NonInferiority:
    """Mean difference of paired accuracies, and two one-sided tests of it: above `-MARGIN`, below 0.

    Attributes:
        mean: variant - baseline, as a fraction.
        low: lower end of the one-sided 95 % interval: the mean is at least this.
        high: upper end of the other one-sided 95 % interval: it is at most this.
        p_value: of the hypothesis that the mean is `-MARGIN` or less; NaN below `MIN_BLOCKS` pairs.
        p_worse: of the hypothesis that the mean is 0 or more; NaN there too.
    """

    mean: float
    low: float
    high: float
    p_value: float
    p_worse: float


def non_inferiority(differences: Sequence[float], margin: float = MARGIN) -> NonInferiority:
    """Test by Student's t that accuracy is lost by less than `margin`, and that it is lost at all.

    Differences that are all the same and not 0 show no spread, so that nothing can be tested: accuracy
    moves in steps of one image, and such repetitions are too few.

    Args:
        differences: variant - baseline of each repetition, as fractions.
        margin: loss that counts as none.
    """
    values: NDArray[np.float64] = np.asarray(differences, dtype=float)
    n, mean = len(values), float(np.mean(values)) if len(values) else np.nan
    if n < MIN_BLOCKS:
        return NonInferiority(mean, np.nan, np.nan, np.nan, np.nan)
    error = float(values.std(ddof=1)) / np.sqrt(n)
    half = float(half_width(error, n - 1.0, 2 * LEVEL))
    if not values.any():  # every repetition has its baseline's accuracy, to the image
        return NonInferiority(0.0, 0.0, 0.0, 0.0, 0.5)  # neither lost nor gained
    if np.ptp(values) < 1e-12:
        return NonInferiority(mean, np.nan, np.nan, np.nan, np.nan)
    p_value = float(t_below(n - 1.0, -(mean + margin) / error))
    p_worse = float(t_below(n - 1.0, mean / error))
    return NonInferiority(mean, mean - half, mean + half, p_value, p_worse)


def accuracy_claims(groups: Sequence[DataFrame], baselines: Sequence[object]) -> DataFrame:
    """Return `COLUMNS`, one row per setting: its accuracy against its baseline's, over repetitions.

    A repetition is paired with the baseline of the same repetition. The claim is

    - `better`: `no worse`, and shown to gain, at 5 % after Holm over the settings of one baseline;
    - `no worse`: shown to lose less than `MARGIN`, at 5 % after Holm over the settings of one baseline,
      be it that less than that is shown to be lost;
    - `worse`: shown to lose anything at all, at 5 % after Holm in the same way;
    - `diverged`: a repetition diverged, whatever the others reached;
    - `not shown`, `too few repetitions` otherwise.

    Args:
        groups: cells of each setting, one row per repetition.
        baselines: for each setting what names its baseline setting; settings of one baseline are one
            family.
    """
    known = {
        (str(row["device"]), str(row["cell_id"])): float(row["accuracy_top1"])
        for group in groups
        for row in group[group["status"] == Status.measured].to_dict("records")
    }
    pairs = [_differences(group, known) for group in groups]
    tests = [non_inferiority(found) for found in pairs]
    families = [str(b) for b in baselines]
    p_values = ([t.p_value, t.p_worse, 1 - t.p_worse] for t in tests)
    adjusted = [
        Series(column, dtype=float).groupby(families).transform(holm)
        for column in zip(*p_values, strict=True)
    ] or [Series(dtype=float)] * 3
    return DataFrame(
        {
            "accuracy_difference": [test.mean for test in tests],
            "accuracy_difference_low": [test.low for test in tests],
            "accuracy_difference_high": [test.high for test in tests],
            "accuracy_pairs": [len(found) for found in pairs],
            "accuracy_p_holm": adjusted[0],
            "accuracy_p_worse_holm": adjusted[1],
            "accuracy_claim": [_claim(*row) for row in zip(groups, tests, *adjusted, strict=True)],
        }
    )


def _differences(group: DataFrame, known: Mapping[tuple[str, str], float]) -> list[float]:
    """Return variant - baseline of the repetitions of which both were measured on one device."""
    found = [
        known.get((str(row["device"]), str(row["cell_id"])), np.nan)
        - known.get((str(row["device"]), str(row["baseline_cell_id"])), np.nan)
        for row in group.to_dict("records")
        if row["cell_id"] != row["baseline_cell_id"]
    ]
    return [difference for difference in found if not np.isnan(difference)]


def _claim(
    group: DataFrame, test: NonInferiority, p_holm: float, p_worse_holm: float, p_better_holm: float
) -> str:
    if (group["status"] == Status.diverged).any():
        return str(Status.diverged)
    if group["accuracy_top1"].isna().all():
        return ""  # nothing was trained
    if (group["cell_id"] == group["baseline_cell_id"]).any():
        return Claim.baseline
    if np.isnan(p_holm):
        return TOO_FEW if not np.isnan(test.mean) else ""
    if p_holm < LEVEL:
        return BETTER if p_better_holm < LEVEL else NO_WORSE
    return WORSE if p_worse_holm < LEVEL else NOT_SHOWN


# Top-1 on the held-out images over each training: the evaluations of its record, and their mean.


POINT = ("epoch", "seconds", "accuracy_top1")
"""What is known of an evaluation: epochs trained, seconds of training until then, and top-1."""
CURVE_COLUMNS = ("sweep", "cell_id", "run_id", *POINT)


def evaluations_of(store: Store, runs: DataFrame) -> DataFrame:
    """Return the evaluations of every training of a store, oldest first: `CURVE_COLUMNS`.

    Args:
        store: of the records; only those of cells that trained are read.
        runs: its runs.
    """
    if "accuracy_top1" not in runs:
        return DataFrame(columns=list(CURVE_COLUMNS))
    trained = dict.fromkeys(runs.loc[runs["accuracy_top1"].notna(), "cell_id"])
    records = (record for cell_id in trained for record in store.runs(str(cell_id)))
    rows = [
        {"sweep": store.name, "cell_id": record.cell_id, "run_id": record.run_id, **point}
        for record in records
        for point in _points(record)
    ]
    return DataFrame(rows, columns=list(CURVE_COLUMNS))


def _points(record: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the whole evaluations of a record; none where nothing was trained."""
    for point in record.samples.get("training") or ():
        found = {column: point.get(column) for column in POINT}
        if not any(missing(value) for value in found.values()):
            yield found
