"""ViT training as others report it in 2024 to 2026, beside a sweep: images per second and GPU, and MFU.

None of these sources prints an interval. MFU is computed from their throughput: three forward passes,
over the dense peak of the format (989 TFLOP/s for bf16 on an H100, 312 on an A100); drop path counts
as computed unless the conditions say that it is credited.

    python -m analysis.menu_2026 results/SWEEP
"""

from pandas import DataFrame, to_numeric

from analysis.study import main, with_conditions
from vitsweep.extras.published.figures import published
from vitsweep.tables.formatting import missing, number
from vitsweep.tables.names import varying_columns
from vitsweep.tables.sweep_tables import SweepTables

SOURCE = ["sure", "source"]
CONDITIONS = ("model", "world_size", "device", "images_per_step", "resolution_px", "num_tokens")
"""Settings that the conditions of a row say already."""


def throughput(sweep: SweepTables) -> DataFrame:
    """Published settings, then the measured cells, each by MFU, the largest first.

    `doubt` is `about` where the source rounds, or says no more than "1 day".
    """
    figures = (
        published(experiment="vit_throughput", doubtful=True)
        .assign(
            conditions=lambda t: t["conditions"].str.replace("; 3 x forward.*", "", regex=True),
            doubt=lambda t: t["doubt"].fillna(""),
        )
        .pivot(index=["system", "conditions", *SOURCE, "doubt"], columns="metric", values="value")
        .reset_index()
        .rename(columns={"system": "model", "mfu": "mfu_percent"})
        .sort_values("mfu_percent", ascending=False, key=to_numeric, kind="stable")
    )
    ran = sweep.cells.dropna(subset=["images_per_second_per_rank"])
    cells = ran.pipe(with_conditions).sort_values("mfu", ascending=False, kind="stable")
    measured = DataFrame(
        {
            "model": cells["model"],
            "conditions": _with_settings(cells),
            "images_per_second_per_gpu": cells["images_per_second_per_rank"].map(number),
            "mfu_percent": (100 * cells["mfu"].astype(float)).map(number),
            "sure": "measured",
            "source": cells["cell_id"],
            "doubt": "",
        }
    )
    return DataFrame([*figures.to_dict("records"), *measured.to_dict("records")])


def _with_settings(cells: DataFrame) -> list[str]:
    """Return the conditions of each cell with the settings that tell the cells apart."""
    names = [name for name in varying_columns(cells) if name not in CONDITIONS]
    return [
        "; ".join([row["conditions"], *(f"{n} {row[n]}" for n in names if not missing(row[n]))])
        for _, row in cells.iterrows()
    ]


def techniques(sweep: SweepTables) -> DataFrame:
    """Times and memory with and without single techniques, as their sources print them."""
    figures = published(experiment="menu_2026")
    return figures[["system", "metric", "value", "unit", "conditions", *SOURCE]]


TABLES = {"Throughput": throughput, "Techniques": techniques}

if __name__ == "__main__":
    main("ViT training, 2024 to 2026", TABLES)
