"""USP: unified sequence parallelism (arXiv:2405.07719; yunchang), beside a sweep.

The paper measures single attention calls and language models, this project training steps of Vision
Transformers: rates are not comparable, the order of the degrees may be. Three rows of the paper
(LLAMA3-8B, 64K) carry doubtful degrees and are left out. The maximum of 47 % MFU is the current abstract's.

    python -m analysis.usp results/SWEEP
"""

from pandas import DataFrame

from analysis.sequences import sequence_rows
from analysis.study import main
from vitsweep.tables.published import beside, memory_parts, published, with_conditions
from vitsweep.tables.sweep_tables import SweepTables

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
