"""Does a speedup come from where its technique works, or did something else of the step move?"""

from pandas import DataFrame

from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.technique import PHASES
from vitsweep.tables.blocks import ROW
from vitsweep.tables.stats import MIN_BLOCKS, mean_p_value
from vitsweep.tables.valid_runs import KeyedRuns

JOINT_LEVEL = 0.01
"""Probability of a footnote where none of the phases that a technique does not touch has moved."""
SHARE = 0.25
"""Phases that moved by less than this share of the whole difference are not worth a footnote."""
SAME = ("images_per_step", "world_size")


def moved_elsewhere(known: KeyedRuns, good: DataFrame) -> dict[int, str]:
    """Return a sentence for each row whose difference stems from phases that its techniques do not touch.

    Per block the milliseconds of each such phase are compared with the baseline's by Student's t, jointly at
    1 % over the phases of a row (Bonferroni). What moved together by more than a quarter of the
    difference of the whole step is named: another program, another place in memory, or the machine.

    Args:
        known: the runs by row.
        good: those that count.
    """
    phases = [f"{p}_ms" for p in PHASES if f"{p}_ms" in good and good[f"{p}_ms"].notna().any()]
    if len(phases) < 2:
        return {}
    per_block = good.groupby([ROW, "block"], sort=False, observed=True)[phases].mean().dropna()
    table = per_block.reset_index()
    table = table.assign(_base=table[ROW].map(known.rows["baseline"]))
    table = table[table["_base"].notna() & (table["_base"] != table[ROW])]
    base = per_block.reset_index().rename(columns={ROW: "_base"}).astype({"_base": float})
    both = table.merge(base, on=["_base", "block"], suffixes=("", "_of_base"))
    more = DataFrame({p: both[p] - both[f"{p}_of_base"] for p in phases}).assign(row=both[ROW])
    specs = good.drop_duplicates(ROW, keep="last").set_index(ROW)
    found = {}
    for row, some in more.groupby(ROW):
        changed = _changed(specs, int(row), int(known.rows.at[row, "baseline"]))  # type: ignore[arg-type]
        if len(some) >= MIN_BLOCKS and changed and (said := _said(some[phases], changed)):
            found[int(row)] = said  # type: ignore[arg-type]
    return found


def _changed(specs: DataFrame, row: int, base: int) -> list[str]:
    """Return the groups in which a row differs from its baseline; none where sizes differ."""
    if any(c in specs and str(specs.at[row, c]) != str(specs.at[base, c]) for c in SAME):
        return []
    return [g for g in GROUPS if g in specs and str(specs.at[row, g]) != str(specs.at[base, g])]


def _said(more: DataFrame, changed: list[str]) -> str:
    touched = {f"{phase}_ms" for group in changed for phase in GROUPS[group].touches}
    others = [p for p in more if p not in touched]
    if not others:
        return ""
    p_values = {p: mean_p_value(more[p].to_numpy(float)) for p in others}
    moved = more[[p for p in others if p_values[p] < JOINT_LEVEL / len(others)]].mean()
    if abs(moved.sum()) <= SHARE * abs(more.mean().sum()):
        return ""
    parts = [f"{str(phase).removesuffix('_ms')} {ms:+.3g} ms" for phase, ms in moved.items()]
    names = " and ".join(group.replace("_", " ") for group in changed)
    return f"moved elsewhere: {', '.join(parts)} a step, which {names} does not touch"
