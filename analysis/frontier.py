"""Sequence length scaling in Vision Transformers on Frontier (arXiv:2405.15780), beside a sweep.

Only the abstract was available: one efficiency, at 2,048 GPUs, and how it is normalised was never found.

    python -m analysis.frontier results/SWEEP
"""

from pandas import DataFrame

from analysis.sequences import longest, sequence_rows
from analysis.study import beside, main, with_conditions
from vitsweep.extras.published.figures import conditions, published
from vitsweep.tables.scaling import scaling_efficiency
from vitsweep.tables.sweep_tables import SweepTables

PAPER = r"arXiv 2405\.15780"
FIGURE = ["value", "unit", "conditions", "sure", "source"]


def batch_scaling(sweep: SweepTables) -> DataFrame:
    """Weak-scaling efficiency (images per rank fixed) by number of GPUs."""
    curve = scaling_efficiency(sweep.runs, sweep.baselines).pipe(with_conditions)
    weak = curve[curve["scaling"] == "weak"].rename(columns={"world_size": "gpus"})
    columns = [
        "curve",
        "gpus",
        "images_per_second",
        "efficiency",
        "efficiency_low",
        "efficiency_high",
        "efficiency_note",
    ]
    measured = weak.reindex(columns=[*columns, "oversubscribed", "conditions"])
    return beside(measured.astype({"gpus": int}), _at_gpus("batch_scaling_efficiency"), on=["gpus"])


def longest_sequence(sweep: SweepTables) -> DataFrame:
    """Longest sequence by method and number of GPUs, and what the abstracts report."""
    figures = published(rf"{PAPER}|2311\.02382", metric="sequence").assign(
        gpus=lambda t: [conditions(text).get("gpus") for text in t["conditions"]],
        method=lambda t: t["system"].map({"LSS": "lss"}).fillna("published"),
    )
    measured = longest(sequence_rows(sweep.cells))
    return beside(
        measured, figures[["method", "gpus", "system", "metric", *FIGURE]], on=["method", "gpus"]
    )


def claims(sweep: SweepTables) -> DataFrame:
    """Every other figure of the two abstracts."""
    figures = published(rf"{PAPER}|2311\.02382")
    return figures[["system", "metric", *FIGURE]]


def _at_gpus(metric: str) -> DataFrame:
    figures = published(PAPER, metric=metric)
    return figures.assign(gpus=[int(conditions(text)["gpus"]) for text in figures["conditions"]])[
        ["gpus", "system", "metric", *FIGURE]
    ]


TABLES = {"Batch scaling": batch_scaling, "Longest sequence": longest_sequence, "Claims": claims}

if __name__ == "__main__":
    main("Sequence length scaling in Vision Transformers on Frontier", TABLES)
