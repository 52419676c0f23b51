"""USP: unified sequence parallelism (arXiv:2405.07719; yunchang), beside a sweep.

The paper measures single attention calls and language models, this project training steps of Vision
Transformers: rates are not comparable, the order of the degrees may be. Three rows of the paper
(LLAMA3-8B, 64K) carry doubtful degrees and are left out. The maximum of 47 % MFU is the current abstract's.

    python -m analysis.usp results/SWEEP
"""

import pandas as pd
from pandas import DataFrame, Series

from analysis.sequences import sequence_rows
from analysis.study import beside, main
from vitsweep.extras.published.figures import published, with_conditions
from vitsweep.results.record import Status
from vitsweep.tables.formatting import plain
from vitsweep.tables.names import varying_columns
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells

PAPER = r"USP arXiv 2405\.07719$"
SOURCE = ["sure", "source", "conditions"]
HYBRID = ["seq", "tp", "ulysses_degree", "ring_degree"]


def attention(sweep: SweepTables) -> DataFrame:
    """Iterations of one attention call per second, by sequence and degrees; steps/s of the sweep."""
    keys = ["seq", "ulysses_degree", "ring_degree"]
    figures = (
        published(PAPER, "attention")
        .pipe(with_conditions)
        .assign(iterations_per_second=lambda t: t["number"])
    )
    rows = sequence_rows(sweep.cells).query("method in ['ulysses', 'ring', 'usp']")
    measured = rows.assign(
        steps_per_second=1000 / rows["step_time_ms"], measured_on=rows["conditions"]
    )
    return beside(
        measured[[*keys, "cell_id", "method", "steps_per_second", "out_of_memory", "measured_on"]],
        figures[[*keys, "system", "experiment", "iterations_per_second", *SOURCE]],
        on=keys,
    ).sort_values(keys)


def hybrid(sweep: SweepTables) -> DataFrame:
    """TFLOP/s per GPU and MFU by sequence, tensor, Ulysses and ring degree."""
    printed = published(PAPER, "llama").pipe(with_conditions).dropna(subset=["tp"])
    figures = (
        printed.rename(columns={"ulysses": "_u", "ring": "_r", "tflops_per_gpu": "_t"})
        .drop(columns=["ulysses_degree", "ring_degree"], errors="ignore")
        .rename(columns={"_u": "ulysses_degree", "_r": "ring_degree"})
        .pivot_table(index=[*HYBRID, "experiment", *SOURCE], columns="metric", values="number")
        .reset_index()
    )
    rows = sequence_rows(sweep.cells)
    spread = rows[rows["sp"] * rows["tp"] > 1].assign(measured_on=rows["conditions"])
    columns = [*HYBRID, "cell_id", "model_tflops_per_rank", "mfu", "out_of_memory", "measured_on"]
    return beside(spread.reindex(columns=columns), figures, on=HYBRID).sort_values(HYBRID)


def costs(sweep: SweepTables) -> DataFrame:
    """Table 2 as printed: communication and memory of one block, forward and backward."""
    table = published("Table 2", "cost").query("source.str.startswith('USP')")
    return (
        table.pivot(index="system", columns="metric", values="value")
        .reset_index()
        .assign(**table[SOURCE].iloc[0])
    )


def memory(sweep: SweepTables) -> DataFrame:
    """Parts of a rank's memory as measured, beside table 2 with the parts of one rank put in."""
    return memory_parts(sweep.cells)


def headline(sweep: SweepTables) -> DataFrame:
    """The abstract's maximum."""
    return published(PAPER, metric="mfu").query("unit == '%'")[["metric", "value", "unit", *SOURCE]]


def repositories(sweep: SweepTables) -> DataFrame:
    """Attention calls timed in the repositories themselves; nothing of a training step."""
    figures = published("yunchang|ring-flash-attention|Ring Attention|DeepSpeed-Ulysses")
    return figures[["system", "experiment", "metric", "value", "unit", *SOURCE]]


# Memory of a rank by part, beside the cost table of USP (arXiv:2405.07719, table 2).


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
    columns = list(dict.fromkeys([*varying_columns(cells), "world_size"]))
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


TABLES = {
    "Attention": attention,
    "Hybrid": hybrid,
    "Cost table": costs,
    "Memory": memory,
    "Headline": headline,
    "Attention in the repositories": repositories,
}

if __name__ == "__main__":
    main("USP: a unified sequence parallelism approach", TABLES)
