"""LASP: linear attention sequence parallelism (arXiv:2404.02882), beside a sweep.

Throughput and memory are read off plots (about 2 %). A reviewer noted that the baselines run without the
right-product trick. The paper's own comparison of communication volumes was never found and is not quoted.

    python -m analysis.lasp results/SWEEP
"""

from pandas import DataFrame

from analysis.sequences import longest, sequence_rows
from analysis.study import beside, main
from vitsweep.extras.published.figures import published, with_conditions
from vitsweep.tables.sweep_tables import SweepTables

KEYS = ["gpus", "seq"]
SOURCE = ["sure", "source"]


def throughput(sweep: SweepTables) -> DataFrame:
    """Tokens per second and memory per GPU by number of GPUs and sequence; `OOM` as printed."""
    figures = (
        published("LASP s")
        .pipe(with_conditions)
        .assign(gpus=lambda t: t["gpus"].fillna(t["SP"]))
        .pivot(index=[*KEYS, "experiment", "system", *SOURCE], columns="metric", values="value")
        .reset_index()
        .rename(columns={"throughput": "k_tokens_per_second", "memory_per_gpu": "gb_per_gpu"})
    )
    rows = sequence_rows(sweep.cells).assign(measured_on=lambda t: t["conditions"])
    linear = rows[rows["method"].isin(["lasp", "lasp2", "ulysses", "megatron_sp", "ring"])]
    columns = [
        *KEYS,
        "cell_id",
        "method",
        "sharding",
        "tokens_per_second",
        "peak_gib",
        "out_of_memory",
    ]
    measured = linear.reindex(columns=[*columns, "measured_on"])
    return beside(measured, figures, on=KEYS).sort_values(KEYS)


def longest_sequence(sweep: SweepTables) -> DataFrame:
    """Longest sequence by number of GPUs, and the first length that ran out of memory."""
    figures = (
        published("LASP", metric="max_sequence")
        .pipe(with_conditions)
        .assign(method="lasp")[["method", "gpus", "system", "value", "unit", "conditions", *SOURCE]]
    )
    return beside(longest(sequence_rows(sweep.cells)), figures, on=["method", "gpus"])


def convergence(sweep: SweepTables) -> DataFrame:
    """Loss with and without LASP; the measured columns are plain and LASP cells of the sweep."""
    figures = published("LASP README", "convergence").assign(
        with_lasp=lambda t: t["system"].str.startswith("LASP"),
        sharding=lambda t: t["system"].str.replace("LASP + ", ""),
    )
    wide = figures.pivot(
        index=["experiment", "sharding", *SOURCE], columns="with_lasp", values="number"
    )
    printed = wide.rename(columns={False: "loss_plain", True: "loss_lasp"}).reset_index()
    return printed.assign(difference=lambda t: t["loss_lasp"] - t["loss_plain"])


def claims(sweep: SweepTables) -> DataFrame:
    """What the abstracts of LASP and LASP-2 claim."""
    figures = published(r"LASP.*arXiv")
    return figures[["system", "metric", "value", "unit", "conditions", *SOURCE]]


TABLES = {
    "Throughput and memory": throughput,
    "Longest sequence": longest_sequence,
    "Convergence": convergence,
    "Claims": claims,
}

if __name__ == "__main__":
    main("LASP: linear attention sequence parallelism", TABLES)
