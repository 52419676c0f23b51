"""The effect of each technique alone, and of techniques added one after the other."""

from collections.abc import Mapping
from typing import Any

from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.names import Changes, named, with_changes
from vitsweep.tables.ratios import contrast, estimate, holm, log_ratios, log_throughput_per_block
from vitsweep.tables.speedup import claims
from vitsweep.tables.status import counted
from vitsweep.tables.tidy import one_device_each

COLUMNS = (
    "baseline_cell_id kind position added cell_id status images_per_second throughput_spread "
    "speedup speedup_low speedup_high claim num_pairs gain gain_low gain_high gain_claim"
).split()
NAMES = {"speedup": "gain", "speedup_low": "gain_low", "speedup_high": "gain_high"}


def waterfall(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Return the techniques one at a time and the longest cumulative sequence, per baseline.

    `kind` is `alone` (one change against the baseline) or `cumulative` (each row keeps the changes
    of the row above and adds `added`; position 0 is the baseline). `speedup` is over the baseline,
    `gain` over the row above, each with its own interval and claim: paired where both shared
    blocks, else by way of the baseline (see `contrast`). The speedups of a cumulative sequence all
    divide by one baseline: they are not factors to multiply. A technique that was not measured
    keeps its row with its `status`.

    Raises:
        VitsweepError: cells of one baseline ran on different devices (unless `mixed_hardware`).
    """
    table = with_changes(one_device_each(cells(runs, baselines), mixed_hardware))
    rows = [r for _, group in table.groupby("baseline_cell_id", sort=False) for r in _steps(group)]
    steps = DataFrame(rows, columns=["cell_id", "kind", "position", "added", "previous"])
    gains = _gains(steps, runs, baselines)
    return (
        steps.merge(table, on="cell_id")
        .merge(gains, on=["cell_id", "kind"])
        .reindex(columns=COLUMNS)
    )


def longest_sequence(sets: list[Changes]) -> list[Changes]:
    """Return the longest sequence in which every set holds the one before, shortest sets first."""
    best: dict[Changes, list[Changes]] = {}
    for current in sorted(dict.fromkeys(sets), key=len):
        below = [best[s] for s in best if s < current]
        best[current] = [*max(below, key=len, default=[]), current]
    return max(best.values(), key=len, default=[])


def _gains(steps: DataFrame, runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    per_block = log_throughput_per_block(counted(runs))
    over_baseline = log_ratios(per_block, baselines)
    rows = [_gain(step, per_block, over_baseline) for step in steps.to_dict("records")]
    columns = ["num_blocks", "speedup", "speedup_low", "speedup_high", "p_value"]
    table = DataFrame(rows, columns=columns, index=steps.index).assign(
        cell_id=steps["cell_id"], kind=steps["kind"], baseline_cell_id=steps["previous"]
    )
    adjusted = table.groupby("kind")["p_value"].transform(holm) if len(table) else table["p_value"]
    return (
        table.assign(p_holm=adjusted)
        .assign(gain_claim=claims)
        .rename(columns=NAMES)[["cell_id", "kind", *NAMES.values(), "gain_claim"]]
    )


def _gain(
    step: Mapping[Any, Any], per_block: DataFrame, over_baseline: DataFrame
) -> dict[str, Any]:
    new, old = step["cell_id"], step["previous"]
    if new == old:
        return {"speedup": 1.0 if new in set(per_block["cell_id"]) else None, "num_blocks": 0.0}
    pair = per_block[per_block["cell_id"].isin([new, old])]
    paired = estimate(log_ratios(pair, {new: old})).to_dict("records")
    if paired:
        return {str(k): v for k, v in paired[0].items()}
    if new not in set(over_baseline["cell_id"]):
        return {"num_blocks": 0.0}
    return contrast({new: 1.0, old: -1.0}, over_baseline)


def _steps(group: DataFrame) -> list[tuple[Any, ...]]:
    by_changes = dict(zip(group["changes"], group["cell_id"], strict=True))
    baseline = group["baseline_cell_id"].iloc[0]
    alone = [
        (cell, "alone", i, named(c), baseline)
        for i, (c, cell) in enumerate(by_changes.items())
        if len(c) == 1
    ]
    measured = group[group["status"] == Status.measured]
    sequence = longest_sequence(list(measured["changes"]))
    if len(sequence) < 3:  # the baseline and one technique: the same as alone
        return alone
    pairs = zip([frozenset[str](), *sequence], sequence, strict=False)
    return alone + [
        (by_changes[new], "cumulative", i, named(new - old), by_changes.get(old, baseline))
        for i, (old, new) in enumerate(pairs)
    ]
