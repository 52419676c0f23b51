"""One row per setting over its repetitions, such as seeds (`sweep.replicate=seed`).

Every repetition stays a cell of its own, with its own row in `cells.parquet`; this is a view of them.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, METRICS, columns, metrics_with
from vitsweep.results.record import Status
from vitsweep.spec.measurement import Measurement
from vitsweep.tables.accuracy import COLUMNS as ACCURACY
from vitsweep.tables.accuracy import accuracy_claims
from vitsweep.tables.cells import in_record_order, off_ratios, typed, with_notes
from vitsweep.tables.formatting import count, missing, plain
from vitsweep.tables.names import comparable, metric_columns, spec_columns
from vitsweep.tables.render import SHOWN
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.stats import Claim, half_width, mean_interval
from vitsweep.tables.valid_runs import checked_cells

OF_COMMAND = {
    f"measurement.{f.name}" for f in fields(Measurement) if not f.metadata.get("identity", True)
}
"""Spec columns in which repetitions of one setting may differ: they do not make another cell."""


def replicates(cells: DataFrame, key: str) -> DataFrame:
    """Return one row per setting: cells that differ only in `key` are repetitions of one setting.

    The repetitions are the sample: standard deviations (`speedup_sd`, `images_per_second_sd`,
    `accuracy_top1_sd`) are over them, and so are the 95 % intervals (`_low`, `_high`; Student's t, empty
    below three repetitions). The claim on accuracy is that of `accuracy_claims`.
    `speedup` is the geometric mean of the speedups, each over the baseline of
    the same repetition and within blocks. Claims are those of `speedup_over`, to which a repetition is a
    block; the family is all settings of one baseline.

    Args:
        cells: one row per cell.
        key: spec column, `seed`.

    Returns:
        The columns of a table of cells, where `cell_id` is that of the first repetition, `cell_ids` lists
        all, and `replicates` of `replicates_asked` repetitions were measured. A setting is `measured`
        where one of them was; `reason` then names those that were not.
    """
    cells = checked_cells(
        cells, *SHOWN, "sweep", "device", "baseline_cell_id", "num_pairs", "seconds_to_target"
    )
    if key not in cells or cells.empty:
        return cells.iloc[:0]
    groups = [rows.sort_values(key, kind="stable") for rows in _settings(cells, key)]
    rows = [_row(group, key) for group in groups]
    first = {
        (str(row["device"] or ""), cell): row["cell_id"]
        for row, group in zip(rows, groups, strict=True)
        for cell in group["cell_id"]
    }
    for row in rows:
        baseline = row["baseline_cell_id"]
        here, anywhere = (str(row["device"] or ""), baseline), ("", baseline)
        row["baseline_cell_id"] = first.get(here, first.get(anywhere))
    table = DataFrame(rows).pipe(_compared, groups, key)
    claimed = accuracy_claims(groups, table["baseline_cell_id"].tolist())
    table = table.assign(
        **{c: claimed[c] for c in ACCURACY if claimed["accuracy_claim"].ne("").any()}
    )
    table.attrs = cells.attrs
    return table.pipe(in_record_order).pipe(typed)


def _settings(cells: DataFrame, key: str) -> Iterator[DataFrame]:
    """Yield the rows of each setting, by device; cells that never ran are of every device."""
    same = ["sweep", *(c for c in spec_columns(cells) if c not in (key, *OF_COMMAND))]
    setting = comparable(cells[same]).agg("|".join, axis=1)
    for _, rows in cells.groupby(setting, sort=False):
        device = rows["device"].map(plain)
        for one in dict.fromkeys(device[device != ""]) or [""]:
            yield rows[device.isin(["", one])]


def _row(group: DataFrame, key: str) -> dict[str, Any]:
    """Return the row of one setting, its comparison separately."""
    good = group[group["status"] == Status.measured]
    tried = group[group["status"].isin([Status.measured, *NEVER_ARRIVES])]
    known = good if len(good) else group
    base = known["baseline_cell_id"].dropna()
    setting = [c for c in spec_columns(group) if c != key]
    head = {
        "cell_id": group["cell_id"].iloc[0],
        "cell_ids": ",".join(map(str, group["cell_id"])),
        "sweep": group["sweep"].iloc[0],
        "device": next((d for d in group["device"] if not missing(d)), ""),
        "replicated": key,
        "replicates": len(good),
        "replicates_asked": len(group),
        "reached_target": _reached(tried),
        "missed_target": _missed(tried),
        "blocks": good["blocks"].sum(),
        "baseline_cell_id": base.iloc[0] if len(base) else None,
    }
    flags = {f: bool(good[f].eq(True).any()) for f in FLAGS if f in good}
    compared = columns("comparison")
    censored = bool(_missed(tried))
    means = {
        m: _median(tried[m]) if censored and m in TO_TARGET else _mean(good[m], m)
        for m in metric_columns(group)
        if m not in compared
    }
    spreads: dict[str, Any] = {}
    for metric in metrics_with(spread=True):
        known_ = good[metric].iloc[:0] if censored and metric in TO_TARGET else good[metric]
        spreads |= _spread(known_, metric, _rounding(good) if metric in TO_TARGET else 0.0)
    return (
        head
        | _outcome(group, good, key)
        | {c: known[c].iloc[0] for c in setting}
        | means
        | spreads
        | flags
    )


def _outcome(group: DataFrame, good: DataFrame, key: str) -> dict[str, Any]:
    """Return status and reason of a setting: which of its repetitions were not measured, and why."""
    if len(good) == len(group):
        return {"status": str(Status.measured), "reason": ""}
    lost = group.drop(good.index)
    reasons = {plain(reason) for reason in lost["reason"]}
    alike = lost["status"].map(plain).nunique() == 1 and len(reasons) == 1
    if good.empty and alike:
        return {"status": lost["status"].iloc[0], "reason": reasons.pop()}
    ends = [
        f"{key}={plain(value)} {plain(status).replace('_', ' ') or 'not run'}"
        for value, status in zip(lost[key], lost["status"], strict=True)
    ]
    why = f" ({reason})" if len(reasons) == 1 and (reason := reasons.pop()) else ""
    noun = count(len(group), key)
    status = str(Status.measured) if len(good) else lost["status"].iloc[0]
    return {"status": status, "reason": f"{len(good)} of {noun} measured: {', '.join(ends)}{why}"}


NEVER_ARRIVES = (Status.diverged, Status.timed_out, Status.failed, Status.out_of_memory)
"""Ends of a training that did not reach its target, however fast the others did."""
TO_TARGET = ("seconds_to_target", "epochs_to_target")


def _reached(tried: DataFrame) -> int | None:
    """Return how many repetitions reached `task.target_accuracy`; None where there is none."""
    target = tried.get("task.target_accuracy")
    if target is None or target.isna().all() or "seconds_to_target" not in tried:
        return None
    return int(tried["seconds_to_target"].notna().sum())


def _missed(tried: DataFrame) -> int | None:
    """Return how many repetitions never reached the target.

    The mean over those that did leaves out the slowest: it is smaller than the truth, most of all where
    fewest arrived. The median, with those that did not arrive as the slowest, is known where most did.
    """
    reached = _reached(tried)
    return None if reached is None else len(tried) - reached


def _median(values: Series) -> float:
    """Return the median with missing values as the largest; NaN where it is one of them."""
    middle = float(values.astype(float).fillna(np.inf).median())
    return middle if np.isfinite(middle) else np.nan


def _mean(values: Series, metric: str) -> float:
    numbers = values.dropna().astype(float)
    if numbers.empty:
        return np.nan
    if _is_geometric(metric) and (numbers > 0).all():
        return float(np.exp(np.log(numbers).mean()))
    return float(numbers.mean())


def _is_geometric(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].mean == "geometric"


def _rounding(good: DataFrame) -> float:
    """Return the variance of the log of times to the target that is hidden by evaluations being rare.

    A target is reached somewhere between two evaluations: seeds that all arrive at the same one look alike.
    """
    if not {"epochs_to_target", "task.evaluate_every_epochs"} <= set(good):
        return 0.0
    share = (good["task.evaluate_every_epochs"] / good["epochs_to_target"]).astype(float).mean()
    return float(np.nan_to_num(share)) ** 2 / 12


def _spread(values: Series, metric: str, hidden: float = 0.0) -> dict[str, float]:
    """Return standard deviation and ends of the 95 % interval on the mean over repetitions.

    Args:
        values: one per repetition.
        metric: their column.
        hidden: variance of their logs that the values do not show.
    """
    numbers = values.dropna().to_numpy(float)
    is_log, number = _is_geometric(metric), len(numbers)
    middle, low, high = mean_interval(np.log(numbers) if is_log else numbers)
    if hidden and low == low:
        half = np.hypot(high - middle, half_width(np.sqrt(hidden / number), number - 1.0))
        low, high = middle - half, middle + half
    ends = np.exp([low, high]) if is_log else (low, high)
    sd = numbers.std(ddof=1) if number > 1 else np.nan
    return {f"{metric}_sd": sd, f"{metric}_low": ends[0], f"{metric}_high": ends[1]}


def _compared(table: DataFrame, groups: list[DataFrame], key: str) -> DataFrame:
    """Add speedup, interval and claim: those of `speedup_over`, to which a repetition is a block."""
    number = {
        (d, c): i for i, (d, c) in enumerate(zip(table["device"], table["cell_id"], strict=True))
    }
    bases = zip(table["device"], table["baseline_cell_id"], strict=True)
    of_base = {str(i): str(number[b]) if b in number else None for i, b in enumerate(bases)}
    blocks = [_blocks(group, key).assign(cell_id=str(i)) for i, group in enumerate(groups)]
    found = speedup_over(pd.concat(blocks, ignore_index=True), of_base)
    found = (
        found.set_index("cell_id")
        .reindex([str(i) for i in range(len(table))])
        .set_axis(table.index)
    )
    ratios = [b.loc[b["paired"], "images_per_second"].dropna() for b in blocks]
    claim = found["claim"].fillna("").replace(str(Claim.too_few_blocks), "too few repetitions")
    own = "speedup speedup_low speedup_high p_value p_holm claim_low claim_high family_size".split()
    own.append("block_noise")  # from repetition to repetition
    notes = [_note(group, len(some)) for group, some in zip(groups, ratios, strict=True)]
    level = table["images_per_second"].astype(float)
    of_level = level.reindex([int(of_base[str(i)] or i) for i in table.index]).to_numpy()
    told = off_ratios(found, level / of_level)
    return table.assign(
        **{c: found[c] for c in own},
        speedup_sd=[
            float((some if len(some) else every["images_per_second"]).std())
            for some, every in zip(ratios, blocks, strict=True)
        ],
        claim=claim,
        num_pairs=[int(group["num_pairs"].fillna(0).sum()) for group in groups],
        speedup_note=with_notes(Series(notes, table.index, dtype=object), told),
    )


def _blocks(group: DataFrame, key: str) -> DataFrame:
    """Return a run per repetition: its block is the repetition, its throughput the speedup.

    What was not measured comes first, so that a setting has the status of those that were. A repetition
    whose runs were not paired within blocks is in a block of its own.
    """
    measured = group["status"] == Status.measured
    paired = (group["num_pairs"].fillna(0) > 0) | (group["cell_id"] == group["baseline_cell_id"])
    block = group[key].astype(str).where(paired | ~measured, group["cell_id"])
    runs = DataFrame({"status": group["status"], "block": block, "paired": paired, "sweep": ""})
    runs = runs.assign(images_per_second=group["speedup"].where(measured).astype(float))
    return pd.concat([runs[~measured], runs[measured & group["speedup"].notna()]])


def _note(group: DataFrame, num_paired: int) -> str:
    """Return why repetitions that were measured are no part of the speedup."""
    unpaired = (group["status"] == Status.measured) & (group["num_pairs"].fillna(0) == 0)
    lacking = group[unpaired & (group["cell_id"] != group["baseline_cell_id"])]
    if not num_paired:
        lacking = lacking[lacking["speedup"].isna()]
    notes = [note for n in lacking["speedup_note"] if (note := plain(n))]
    return (
        say("lost_repetitions", lost=len(lacking), all=len(group), note=notes[0]) if notes else ""
    )
