"""The first losses of timed steps beside those of the baseline: a cell that leaves them is wrong."""

from collections.abc import Mapping

from pandas import DataFrame, to_numeric

from vitsweep.results.record import Status

SAME = {1: "same_first_loss", 2: "same_losses", 3: "same_losses"}
"""Step -> column that is equal for two cells whose losses in that step are alike."""
FIRST_SHARE = 0.2
"""Share of the tolerance of later losses that the first has: no update has multiplied its rounding."""
COLUMNS = ("loss_tolerance", *dict.fromkeys(SAME.values()), *(f"loss_step_{step}" for step in SAME))


def with_wrong_losses(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Let measured runs whose first losses leave those of their baseline in the same block be `wrong`.

    Both begin from the same weights and see the same images. The loss before any update is compared
    where model, images and random draws agree; those after one and two updates where the definition of
    the optimizer does as well. A loss may differ by the tolerances of both cells; the first by a fifth.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
    """
    if not {"block", *COLUMNS} <= set(runs.columns):
        return runs
    told = runs.loc[runs["status"] == Status.measured, ["cell_id", "block", *COLUMNS]]
    losses = [f"loss_step_{step}" for step in SAME]
    told[losses] = told[losses].apply(to_numeric)  # of runs without any, a column is all None
    base = told.drop_duplicates(["cell_id", "block"])
    told = told.assign(place=told.index)
    pairs = told.assign(baseline=told["cell_id"].map(baselines)).merge(
        base.rename(columns={"cell_id": "baseline"}),
        on=["baseline", "block"],
        suffixes=("", "_base"),
    )
    pairs = pairs[pairs["cell_id"] != pairs["baseline"]]
    runs = runs.copy() if len(pairs) else runs
    for step, same in SAME.items():
        loss, wanted = pairs[f"loss_step_{step}"], pairs[f"loss_step_{step}_base"]
        share = FIRST_SHARE if step == 1 else 1.0
        allowed = share * (pairs["loss_tolerance"] + pairs["loss_tolerance_base"])
        apart = (loss - wanted).abs() / wanted.abs()
        wrong = (pairs[same] == pairs[f"{same}_base"]) & (apart > allowed)
        for _, row in pairs.assign(apart=apart, allowed=allowed)[wrong].iterrows():
            if runs.at[row["place"], "status"] == Status.measured:
                runs.at[row["place"], "status"] = Status.wrong.value
                runs.at[row["place"], "reason"] = (
                    f"The loss of timed step {step} is {row[f'loss_step_{step}']:.5f}, and that of the "
                    f"baseline in the same block {row[f'loss_step_{step}_base']:.5f}: they differ by "
                    f"{row['apart']:.2g}, where rounding explains {row['allowed']:.2g}."
                )
    return runs
