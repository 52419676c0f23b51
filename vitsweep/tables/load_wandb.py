"""A W&B project as a table: the mirror holds the same columns as the record."""

from typing import Any

from pandas import DataFrame

from vitsweep.errors import VitsweepError


def from_wandb(project: str, api: Any = None) -> DataFrame:
    """Return one row per W&B run of `ENTITY/PROJECT`: its config and its summary, flat.

    Keys that W&B adds by itself (they begin with `_`) are left out.

    Raises:
        VitsweepError: the project has no runs.
    """
    if api is None:
        import wandb

        api = wandb.Api()
    rows = [_flat(run.config) | _flat(dict(run.summary)) for run in api.runs(project)]
    if not rows:
        raise VitsweepError(f"`wandb:{project}` holds no runs.")
    return DataFrame(rows)


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if not key.startswith("_")}
