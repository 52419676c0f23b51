"""Rows of a sweep in the words of the sequence-parallel papers: sequence, degrees, ranks."""

import pandas as pd
from pandas import DataFrame, Series

from analysis.study import with_conditions

AXES = {"ulysses_degree": "mesh.ulysses", "ring_degree": "mesh.ring", "tp": "mesh.tensor"}


def sequence_rows(cells: DataFrame) -> DataFrame:
    """Return every cell that was run, with `gpus, seq, sp`, the degrees, `out_of_memory`, peak.

    `seq` is the number of tokens of one sample, over all ranks; `sp` the ranks that share them.
    """
    table = with_conditions(cells)
    degrees = {name: _degree(table, column) for name, column in AXES.items()}
    return table.assign(
        **degrees,
        gpus=table["world_size"],
        seq=table["num_tokens"],
        sp=_degree(table, "mesh.sequence") * degrees["ulysses_degree"] * degrees["ring_degree"],
        method=table["sequence_parallel"].astype(str),
        out_of_memory=table["status"].astype(str) == "out_of_memory",
    )


def longest(rows: DataFrame) -> DataFrame:
    """Return per method and number of ranks the longest measured sequence, and the first that
    did not fit (empty where none was tried)."""
    keys = ["method", "gpus"]
    measured = rows[rows["status"].astype(str) == "measured"].groupby(keys)["seq"].max()
    failed = rows[rows["out_of_memory"]].groupby(keys)["seq"].min()
    return pd.concat(
        {"max_sequence": measured, "out_of_memory_at": failed}, axis="columns"
    ).reset_index()


def _degree(table: DataFrame, column: str) -> Series:
    if column not in table:
        return Series(1, table.index)
    return pd.to_numeric(table[column]).fillna(1).astype(int)
