"""The answer of a sweep in one sentence, from the numbers alone."""

from pandas import DataFrame, Series

from vitsweep.charts.caption import values
from vitsweep.results.record import Status
from vitsweep.tables import words
from vitsweep.tables.columns import varying
from vitsweep.tables.coverage import counts

MOST = 8
"""Baselines that are answered for, one sentence each; the table has the others."""


def question(cells: DataFrame) -> str:
    """Return the question a sweep without a stated one asks."""
    groups = [c.replace("_", " ") for c in varying(cells)]
    what = f"combination of {', '.join(groups)}" if groups else "setting"
    return f"Which {what} trains {values(cells, 'model') or 'the model'} fastest?"


def answers(cells: DataFrame) -> list[str]:
    """Return one sentence per baseline, or one for the sweep where there is none."""
    measured = cells[cells["status"] == Status.measured]
    if measured.empty:
        ended = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts(cells).to_numpy())
        return [f"Nothing was measured: {ended}."]
    compared = measured[measured["speedup"].notna() & (measured["claim"] != "baseline")]
    if compared.empty:
        return [_fastest(measured, varying(cells))]
    groups = compared.groupby("baseline_cell_id", sort=False)
    return [_over_baseline(group, measured, varying(cells)) for _, group in groups][:MOST]


def _fastest(measured: DataFrame, columns: list[str]) -> str:
    best = measured.iloc[int(measured["images_per_second"].argmax())]
    return (
        f"{_name(best, columns)} had the highest throughput, "
        f"{words.number(best['images_per_second'])} img/s; nothing was compared with a baseline."
    )


def _over_baseline(group: DataFrame, measured: DataFrame, columns: list[str]) -> str:
    best = group.iloc[int(group["speedup"].argmax())]
    base = measured.set_index("cell_id").loc[best["baseline_cell_id"]]
    name, against = _name(best, columns), f"the baseline {_name(base, columns)}"
    size = f"{words.speedup(best)} over {words.count(best['num_pairs'], 'block')}"
    rates = " against ".join(words.number(r["images_per_second"]) for r in (best, base)) + " img/s"
    sentences = {
        "faster": f"{name} is fastest: {size} against {against}, {rates}{_rivals(group, best)}.",
        "slower": f"Nothing beat {against}; the nearest is {name}, {size}.",
        "too few blocks": f"{name} had the highest throughput, {size} against {against}, {rates}; "
        "fewer than 3 blocks, so nothing is claimed.",
    }
    noise = f"Nothing is shown to beat {against}; the nearest is {name}, {size}, inside the noise."
    return sentences.get(best["claim"], noise)


def _rivals(group: DataFrame, best: Series) -> str:
    overlap = (group["speedup_high"] >= best["speedup_low"]) & (group["cell_id"] != best["cell_id"])
    many = int(overlap.sum())
    if not many:
        return ""
    whose = words.count(many, "other cell")
    return (
        f"; the interval of {whose} overlaps it" if many == 1 else f"; those of {whose} overlap it"
    )


def _name(row: Series, columns: list[str]) -> str:
    return words.cell_label(row, columns) or str(row["model"])
