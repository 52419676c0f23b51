"""The result of a sweep in one sentence per baseline."""

from pandas import DataFrame, Series

from vitsweep.charts.caption import values
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.columns import varying
from vitsweep.tables.names import cell_names, named, with_changes
from vitsweep.tables.show import MANY, counts

MOST = 8
"""The sentences are limited to this many baselines; the table shows all."""


def question(cells: DataFrame) -> str:
    """Return a question for a sweep that has none (`sweep.question`)."""
    groups = [c.replace("_", " ") for c in varying(cells)]
    what = f"combination of {', '.join(groups)}" if groups else "setting"
    what = "combination of techniques" if len(groups) > MANY else what
    return f"Which {what} trains {values(cells, 'model') or 'the model'} fastest?"


def answers(cells: DataFrame) -> list[str]:
    """Return one sentence per baseline, or one for the sweep where there is none."""
    measured = cells[cells["status"] == Status.measured]
    names = dict(zip(cells["cell_id"], cell_names(cells), strict=True))
    if measured.empty:
        statuses = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts(cells).to_numpy())
        return [f"Nothing was measured: {statuses}."]
    compared = measured[measured["speedup"].notna() & (measured["claim"] != "baseline")]
    if compared.empty:
        return [_fastest(measured, names)]
    groups = compared.groupby("baseline_cell_id", sort=False)
    if same := _the_same_everywhere(compared, cells):
        return [same]
    return [_over_baseline(group, measured, names) for _, group in groups][:MOST]


def _the_same_everywhere(compared: DataFrame, cells: DataFrame) -> str:
    """Return one sentence where several baselines have the same answer, else nothing."""
    changes = with_changes(cells).set_index("cell_id")["changes"]
    best = compared.loc[compared.groupby("baseline_cell_id")["speedup"].idxmax()]
    found = set(changes.reindex(best["cell_id"]))
    if len(best) < 2 or len(found) > 1 or (best["claim"] != "faster").any():
        return ""
    ends = f"{formatting.times(best['speedup'].min())} to {formatting.times(best['speedup'].max())}"
    return f"{named(found.pop())} is fastest against each of {len(best)} baselines: {ends}."


def _fastest(measured: DataFrame, names: dict[str, str]) -> str:
    best = measured.iloc[int(measured["images_per_second"].argmax())]
    return (
        f"{names[best['cell_id']]} had the highest throughput, "
        f"{formatting.number(best['images_per_second'])} img/s; nothing was compared with a baseline."
    )


def _over_baseline(group: DataFrame, measured: DataFrame, names: dict[str, str]) -> str:
    best = group.iloc[int(group["speedup"].argmax())]
    base = measured.set_index("cell_id").loc[best["baseline_cell_id"]]
    name, against = names[best["cell_id"]], _the_baseline(names[best["baseline_cell_id"]])
    size = f"{formatting.speedup(best)} over {formatting.count(best['num_pairs'], 'block')}"
    rates = (
        " against ".join(formatting.number(r["images_per_second"]) for r in (best, base)) + " img/s"
    )
    if best["claim"] == "unpaired":
        return (
            f"{name} {_rank(best)}: {formatting.times(best['speedup'])} against {against}, {rates}; "
            "they ran in different jobs, so nothing is claimed."
        )
    sentences = {
        "faster": f"{name} is fastest: {size} against {against}, {rates}{_rivals(group, best)}.",
        "slower": f"Nothing beat {against}; the nearest is {name}, {size}.",
        "too few blocks": f"{name} {_rank(best)}: {size} against {against}, {rates}; "
        "fewer than 3 blocks, so nothing is claimed.",
    }
    noise = f"Nothing is shown to beat {against}; the nearest is {name}, {size}, inside the noise."
    return sentences.get(best["claim"], noise)


def _rank(best: Series) -> str:
    return "had the highest throughput" if best["speedup"] > 1 else "came nearest"


def _rivals(group: DataFrame, best: Series) -> str:
    overlap = (group["speedup_high"] >= best["speedup_low"]) & (group["cell_id"] != best["cell_id"])
    many = int(overlap.sum())
    if not many:
        return ""
    whose = formatting.count(many, "other cell")
    return (
        f"; the interval of {whose} overlaps it" if many == 1 else f"; those of {whose} overlap it"
    )


def _the_baseline(name: str) -> str:
    return f"the {name}" if name.startswith("baseline") else f"the baseline {name}"
