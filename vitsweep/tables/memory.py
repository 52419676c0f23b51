"""Memory of a rank by part, beside the cost table of USP (arXiv:2405.07719, table 2)."""

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.checks import checked_cells
from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import plain
from vitsweep.tables.published import published

PARTS = ("parameter_gib", "gradient_gib", "optimizer_state_gib", "activation_gib")
GATHERED = "gathered_parameter_gib"

SYSTEMS = {
    ("none", "none", "ddp"): "DP",
    ("none", "none", "zero1"): "ZeRO1",
    ("ulysses", "none", "ddp"): "SP-Ulysses",
    ("ring", "none", "ddp"): "SP-Ring",
    ("usp", "none", "zero1"): "USP+ZeRO1",
    ("usp", "none", "zero2"): "USP+ZeRO2",
    ("usp", "none", "fsdp"): "USP+ZeRO3",
    ("none", "megatron", "ddp"): "TP",
    ("megatron_sp", "none", "ddp"): "TP-sp",
}
"""(sequence_parallel, tensor_parallel, sharding) -> the name of the method in the paper's table."""


PARAMETERS = {"P+G": (False, False), "P+G/N": (False, True), "(P+G)/N": (True, True)}
STATE = {"6P": False, "6P/N": True}
ACTIVATIONS = {"A/N": True}  # `alpha A` of TP is between A/N and A

SAME = (
    "model", "data", "precision", "optimizer", "layout", "classifier", "attention", "memory",
    "compilation", "images_per_step", "num_tokens", "accumulation_steps", "model.depth",
    "model.width", "model.mlp_width", "half_dtype",
)  # fmt: skip
"""Columns that a cell has in common with the single-rank cell whose memory is not split."""


def memory_parts(cells: DataFrame) -> DataFrame:
    """Return the measured parts of a rank's memory, and the published formulas evaluated for them.

    `published_...` are the formulas as printed: P parameters, G gradients, 6P the optimizer state
    where P is in 16 bit (a float32 copy and two moments of Adam), A activations, N ranks, alpha what
    TP does not split. `expected_...` puts in P, G, A and the optimizer state of the cell with the
    same model, batch and precision on one rank: empty where that was not measured, or nothing is
    published. Where ranks differ the worst is shown. `gathered_parameter_gib` comes on top while
    blocks are computed: ZeRO-2 holds shards here and gathers all, where the paper's keeps P.
    """
    cells = checked_cells(cells, "world_size", "sequence_parallel", "tensor_parallel", "sharding")
    known = [part for part in PARTS if part in cells]
    measured = cells[cells["status"] == Status.measured].dropna(subset=known, how="all")
    if not known or measured.empty:
        return DataFrame(columns=["cell_id", *PARTS])
    measured = measured.reindex(columns=list(dict.fromkeys([*measured.columns, *PARTS])))
    formulas = _formulas()
    wholes = _wholes(measured)
    rows = [_row(row, formulas, wholes.get(_key(row))) for _, row in measured.iterrows()]
    columns = list(dict.fromkeys([*varying(cells), "world_size"]))
    columns += [GATHERED] * (GATHERED in measured)
    return pd.concat(
        [measured[["cell_id", *columns, *PARTS]], DataFrame(rows, index=measured.index)], axis=1
    )


def _formulas() -> DataFrame:
    """Return table 2 of the paper by method: one row each, with where it was read."""
    printed = published(r"^USP .*Table 2$", "memory_cost")
    formulas = printed.pivot(index="system", columns="metric", values="value")
    return formulas.assign(source=printed["source"].iloc[0], sure=printed["sure"].iloc[0])


def _row(row: Series, formulas: DataFrame, whole: Series | None) -> dict[str, object]:
    techniques = (row["sequence_parallel"], row["tensor_parallel"], row["sharding"])
    system = SYSTEMS.get(tuple(plain(t) for t in techniques))  # type: ignore[arg-type]
    if system is None:
        return {}
    printed = Series(formulas.loc[system])
    found: dict[str, object] = {
        "published_system": system,
        "published_parameters_and_gradients": printed["param+grad"],
        "published_optimizer_state": printed["optimizer_state"],
        "published_activations": printed["activation"],
        "published_source": f"{printed['source']} ({printed['sure']})",
    }
    if whole is not None:
        ranks = float(row["world_size"])
        for part, is_split in zip(PARTS, _splits(printed), strict=True):
            if is_split is not None:
                found[f"expected_{part}"] = float(whole[part]) / (ranks if is_split else 1.0)
    return found


def _splits(printed: Series) -> tuple[bool | None, ...]:
    """Return which of `PARTS` are split over the ranks; None where the formula does not say."""
    of_parameters = PARAMETERS[printed["param+grad"]]
    return *of_parameters, STATE[printed["optimizer_state"]], ACTIVATIONS.get(printed["activation"])


def _wholes(measured: DataFrame) -> dict[tuple[str, ...], Series]:
    """Return the cells on one rank, by what others share with them."""
    alone = measured[measured["world_size"] == 1]
    return {_key(row): row for _, row in alone.iterrows()}


def _key(row: Series) -> tuple[str, ...]:
    return tuple(plain(row.get(column)) for column in SAME)
