"""ViT training as others report it in 2024 to 2026, beside a sweep: images per second and GPU, and MFU.

None of these sources prints an interval. MFU is computed from their throughput: three forward passes,
over the dense peak of the format (989 TFLOP/s for bf16 on an H100, 312 on an A100); drop path counts
as computed unless the conditions say that it is credited.

    python -m analysis.menu_2026 results/SWEEP
"""

from pandas import DataFrame

from analysis.study import main, with_conditions
from vitsweep.tables.load import Sweep
from vitsweep.tables.published import published

SOURCE = ["sure", "source"]


def throughput(sweep: Sweep) -> DataFrame:
    """Published settings, then the measured cells, by MFU."""
    figures = (
        published(experiment="vit_throughput")
        .assign(conditions=lambda t: t["conditions"].str.replace("; 3 x forward.*", "", regex=True))
        .pivot(index=["system", "conditions", *SOURCE], columns="metric", values="value")
        .reset_index()
        .rename(columns={"system": "model", "mfu": "mfu_percent"})
    )
    cells = sweep.cells.pipe(with_conditions)
    measured = DataFrame(
        {
            "model": cells["model"],
            "conditions": cells["conditions"],
            "images_per_second_per_gpu": cells["images_per_second_per_rank"],
            "mfu_percent": 100 * cells["mfu"].astype(float),
            "sure": "measured",
            "source": cells["cell_id"],
        }
    )
    return DataFrame([*figures.to_dict("records"), *measured.to_dict("records")])


def techniques(sweep: Sweep) -> DataFrame:
    """Times and memory with and without single techniques, as their sources print them."""
    figures = published(experiment="menu_2026")
    return figures[["system", "metric", "value", "unit", "conditions", *SOURCE]]


TABLES = {"Throughput": throughput, "Techniques": techniques}

if __name__ == "__main__":
    main("ViT training, 2024 to 2026", TABLES)
