"""Times of a run's steps: in its record where ranks are few, else beside it, with quantiles in the record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitsweep.files import make_folder, replacing

MOST_RANKS = 64
"""Of which a record holds every step."""
FILE = "samples.parquet"
"""In the folder of a run's attempt: every step of every rank, where they are more."""
TIMES = ("step_time_ms", "data_wait_ms")
QUANTILES = {"p05": 0.05, "median": 0.5, "p95": 0.95}


def recorded(samples: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the samples that go into the record; the steps of many ranks go into a file.

    The record then holds those of the slowest rank, which make its throughput, and the mean and
    quantiles of every rank over the timed window.

    Args:
        samples: see `RunRecord`.
        folder: of the run's attempt.
    """
    ranks = len(samples.get("step_time_ms", []))
    if ranks <= MOST_RANKS:
        return dict(samples)
    import numpy as np

    times = {name: np.array(samples[name]) for name in TIMES}
    steps, skipped = np.arange(times["step_time_ms"].shape[1]), np.array(samples["skipped"])
    warm_up = steps < samples["warm_up_steps"]
    _write(
        {
            "rank": np.repeat(np.arange(ranks), len(steps)),
            "step": np.tile(steps, ranks),
            **{name: of_ranks.ravel() for name, of_ranks in times.items()},
            "warm_up": np.tile(warm_up, ranks),
            "skipped": np.tile(skipped, ranks),
        },
        folder,
    )
    window = {name: of_ranks[:, ~(warm_up | skipped)] for name, of_ranks in times.items()}
    slowest = int(window["step_time_ms"].sum(axis=1).argmax())
    kept = {name: [samples[name][slowest]] for name in TIMES} | {"ranks": [slowest]}
    return dict(samples) | kept | {"by_rank": _statistics(window)}


def _statistics(window: Mapping[str, Any]) -> dict[str, list[float]]:
    import numpy as np

    if not window["step_time_ms"].size:
        return {}
    named = {"mean": lambda times: times.mean(axis=1)} | {
        label: lambda times, at=share: np.quantile(times, at, axis=1)
        for label, share in QUANTILES.items()
    }
    return {
        f"{name}_{label}": statistic(times).round(4).tolist()
        for name, times in window.items()
        for label, statistic in named.items()
    }


def _write(columns: Mapping[str, Any], folder: Path) -> None:
    from pandas import DataFrame

    with replacing(make_folder(folder) / FILE) as draft:
        DataFrame(columns).to_parquet(draft, index=False)
