"""The result of a sweep in one sentence per baseline."""

from pandas import DataFrame, Series

from vitsweep.charts.caption import values
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.names import MANY, cell_names, named, varying, with_changes
from vitsweep.tables.reasons import counts
from vitsweep.tables.speedup import one_look
from vitsweep.tables.stats import Claim
from vitsweep.tables.valid_runs import SEPARATOR, checked_cells, row_keys

UNKNOWN = Series({"images_per_second": float("nan")})
"""A baseline that the table does not have."""
COMPARED = (
    "sweep", "device", "images_per_second", "speedup", "speedup_low", "speedup_high", "claim",
    "num_pairs", "baseline_cell_id", "speedup_note",
)  # fmt: skip
MOST = 8
"""The sentences are limited to this many baselines; the table shows all."""


def question(cells: DataFrame, replicated: str = "") -> str:
    """Return a question for a sweep that has none (`sweep.question`); repetitions are no choice."""
    groups = [c.replace("_", " ") for c in varying(cells) if c != replicated]
    what = f"combination of {', '.join(groups)}" if groups else "setting"
    what = "combination of techniques" if len(groups) > MANY else what
    return f"Which {what} trains {values(cells, 'model') or 'the model'} fastest?"


def answers(cells: DataFrame) -> list[str]:
    """Return one sentence per baseline, or one for the sweep where there is none."""
    cells = checked_cells(cells, *COMPARED)
    measured = cells[cells["status"] == Status.measured]
    names = dict(zip(cells["cell_id"], cell_names(cells), strict=True))
    if measured.empty:
        statuses = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts(cells).to_numpy())
        return [f"Nothing was measured: {statuses}."]
    compared = measured[measured["speedup"].notna() & (measured["claim"] != Claim.baseline)]
    lost = _without_speedups(measured, compared, names)
    if compared.empty:
        return [_fastest(measured, names), *lost][:MOST]
    if same := _the_same_everywhere(compared, cells):
        return [same, *lost][:MOST]
    bases = {k: row for k, (_, row) in zip(row_keys(measured), measured.iterrows(), strict=True)}
    keys = row_keys(compared, "baseline_cell_id")
    groups = compared.groupby(keys, sort=False)
    where = len({key.partition(SEPARATOR)[2] for key in keys}) > 1
    found = [
        _over_baseline(group, bases.get(str(key), UNKNOWN), names, where) for key, group in groups
    ]
    return [*lost, *found][:MOST]


def _without_speedups(measured: DataFrame, compared: DataFrame, names: dict[str, str]) -> list[str]:
    """Return a sentence per baseline of which every measured cell lost its speedup, with the reason."""
    noted = measured[measured["speedup"].isna() & measured["speedup_note"].fillna("").ne("")]
    keys = row_keys(noted, "baseline_cell_id")
    alone = ~keys.isin(row_keys(compared, "baseline_cell_id"))
    return [
        f"No speedup over {_the_baseline(names.get(base := str(rows['baseline_cell_id'].iloc[0]), base))}: "
        f"{formatting.count(len(rows), 'cell')} measured, of which {names[rows['cell_id'].iloc[0]]} has "
        f"{rows['speedup_note'].iloc[0]}."
        for _, rows in noted[alone].groupby(keys[alone], sort=False)
    ]


def _the_same_everywhere(compared: DataFrame, cells: DataFrame) -> str:
    """Return one sentence where several baselines have the same answer, else nothing."""
    changes = dict(zip(*(with_changes(cells)[c] for c in ("cell_id", "changes")), strict=True))
    keys = row_keys(compared, "baseline_cell_id")
    best = compared.loc[compared["speedup"].groupby(keys).idxmax()]
    found = {changes.get(cell, frozenset()) for cell in best["cell_id"]}
    if len(best) < 2 or len(found) > 1 or (best["claim"] != Claim.faster).any():
        return ""
    ends = f"{formatting.times(best['speedup'].min())} to {formatting.times(best['speedup'].max())}"
    return f"{named(found.pop())} is fastest against each of {len(best)} baselines: {ends}."


def _fastest(measured: DataFrame, names: dict[str, str]) -> str:
    known = measured[measured["images_per_second"].notna()]
    if known.empty:
        return "Cells were measured, but no step was counted: there is no throughput."
    best = known.iloc[int(known["images_per_second"].argmax())]
    return (
        f"{names[best['cell_id']]} had the highest throughput, "
        f"{formatting.number(best['images_per_second'])} img/s; nothing was compared with a baseline."
    )


def _over_baseline(group: DataFrame, base: Series, names: dict[str, str], where: bool) -> str:
    """Return the answer for the cells of one baseline; `where` adds their sweep and device."""
    best = group.iloc[int(group["speedup"].argmax())]
    base_id = str(best["baseline_cell_id"])
    name, against = names[best["cell_id"]], _the_baseline(names.get(base_id, base_id))
    against += f" on {best['device']} (sweep {best['sweep']})" if where else ""
    size = f"{formatting.speedup(best)} over {formatting.count(best['num_pairs'], 'block')}"
    rates = (
        " against ".join(formatting.number(r["images_per_second"]) for r in (best, base)) + " img/s"
    )
    selected = _selected(best)
    if best["claim"] == Claim.unpaired:
        return (
            f"{name} {_rank(best)}: {formatting.times(best['speedup'])} against {against}, {rates}; "
            "they ran in different jobs, so nothing is claimed."
        )
    if best["claim"] == Claim.one_look:
        return f"{name} {_rank(best)} against {against}: {one_look(best['speedup'])}, {rates}."
    sentences = {
        Claim.faster: f"{name} is fastest: {size} against {against}, {rates}"
        f"{_rivals(group, best)}{selected}.",
        Claim.probably_faster: f"{name} is probably faster than {against}: {size}, {rates}; "
        f"{_among(best)}{selected}.",
        Claim.slower: f"Nothing beat {against}; the nearest is {name}, {size}.",
        Claim.probably_slower: f"Nothing beat {against}; the nearest is {name}, {size}.",
        Claim.too_few_blocks: f"{name} {_rank(best)}: {size} against {against}, {rates}; "
        "fewer than 3 blocks, so nothing is claimed.",
    }
    noise = (
        f"No cell is shown to beat {against}. The nearest is {name}, {size}: no difference shown"
        f"{selected}."
    )
    return sentences.get(best["claim"], noise)


def _selected(best: Series) -> str:
    """Return the figure without the bias of having selected the best of several cells."""
    size = formatting.whole(best.get("family_size"))
    adjusted = formatting.times(best.get("selection_adjusted_speedup"))
    if not adjusted or size in ("", "1"):
        return ""
    return f"; {adjusted} after correction for being the best of {size} cells"


def _among(best: Series) -> str:
    """Return the interval that belongs to the claim of a cell among several."""
    ends = formatting.ratio(best["speedup"], best.get("claim_low"), best.get("claim_high"))
    size = formatting.whole(best.get("family_size"))
    return (
        f"among {size} cells the interval is {ends.partition(' ')[2] or 'unknown'}, which holds 1"
    )


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
