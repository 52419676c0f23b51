"""The speedup of every cell over its baseline, with interval and claim."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series, factorize

from vitsweep.results.record import CHOOSING, Status
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import as_text, count, number, plain, value_label
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim, adjusted, any_look_keys, claims, estimate, interval
from vitsweep.tables.valid_runs import KeyedRuns, checked_runs, is_screening, keyed, numbers

SIZES = ("data", "resolution_px", "num_tokens")
OTHER_SIZE = "unequal work"
EMULATE = "precision.emulate"


def other_size(known: KeyedRuns) -> dict[int, str]:
    """Return the sizes of each row and of its baseline where their images, tokens or data differ.

    Images per second of the two are of different work. Tokens that a technique adds or drops do not count.

    Args:
        known: the runs by row.
    """
    specs = known.runs.drop_duplicates(ROW, keep="last").set_index(ROW)
    columns = [c for c in SIZES if c in specs]
    technique = [c for c in ("classifier", "tokens") if c in specs]
    rows = as_text(specs[[*columns, *technique]]).to_dict("index")
    found = {}
    for row, base in known.rows["baseline"].dropna().items():
        if row not in rows or base not in rows:
            continue
        own, other = rows[row], rows[base]
        apart = [c for c in columns if own[c] != other[c]]
        if apart == ["num_tokens"] and any(own[c] != other[c] for c in technique):
            continue
        labels = [" · ".join(value_label(c, of[c]) for c in apart) for of in (own, other)]
        if apart:
            found[row] = say("other_size", own=labels[0], base=labels[1])
    return found  # type: ignore[return-value]


MOST_APART = 2.0
"""From this ratio of their timed windows on, a GPU's clock and heat may differ between two cells."""
LARGEST_DRIFT = 1.02
"""A GPU at its power limit changes its speed by up to this factor in its first seconds (docs/numbers.md)."""


def windows_of(runs: DataFrame, by: str) -> Series:
    """Return the seconds for which each cell was timed, the median of its runs."""
    return numbers(runs, "window_seconds").groupby(runs[by]).median()


def timed_apart(own: float, other: float, whose: str) -> str:
    """Say for how many seconds two cells were timed where these differ by more than `MOST_APART`, else "".

    Args:
        own: seconds of a cell; NaN where unknown.
        other: those of the cell that it is compared with.
        whose: what the sentence calls that.
    """
    if not max(own, other) > MOST_APART * min(own, other):
        return ""
    return say("timed_apart", own=number(own, 2), whose=whose, other=number(other, 2))


def may_be_drift(table: DataFrame, low: str, high: str) -> Series:
    """Return per row whether the interval reaches `LARGEST_DRIFT`, where `timed` says times differ."""
    reaches = (table[low] <= LARGEST_DRIFT) & (table[high] >= 1 / LARGEST_DRIFT)
    return reaches & (table["timed"] != "")


Families = Sequence[Collection[str]]
"""The cells of each command of a sweep, oldest first."""

Integers = NDArray[np.int64]
ITS_OWN, ITS_BASELINE = "it", "its baseline"
NO_PAIR = "no paired runs"
"""No block holds runs of both on the same nodes that counted steps."""
OTHER_NODES = "ran on other nodes than its baseline"


def speedup_over(
    runs: DataFrame, baselines: Mapping[str, str | None], families: Families = ()
) -> DataFrame:
    """Compare every cell with its baseline, block by block.

    Within a block, baseline and variant ran back to back on one machine, so differences between
    blocks cancel in their ratio. Per block d = log(images/s of the variant / images/s of the
    baseline); images/s also compares cells with different images per step. The speedup is
    exp(mean d), its 95 % interval exp(mean d +- t sd(d) / sqrt(blocks)) with Student's t (Gosset
    1908), unadjusted, and wider where many blocks are shown to resemble those before them
    (`stats.widening`); of a cell with runs of a command that chose its blocks by the intervals so far
    (`sweep.minutes`), `stats.any_look_half_width` takes the place of t. Of all cells of one baseline that
    one command compared (a family), a true difference of none is claimed with probability 5 % at most
    (Holm 1979). Claims are

    - `faster`, `slower`: the difference is shown among all cells of the family;
    - `no difference shown`: it is not, whether or not the cell's own interval holds 1;
    - `emulated`: the cell or its baseline emulates a number format (`precision.emulate`), so that its time
      says nothing of the format: there is no interval;
    - `missing blocks`: it is shown, but runs of some blocks ended otherwise (`ENDED`), and what is left is
      biased towards the side that misses them (survivorship bias): nothing is claimed.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
        families: the cells of each command, oldest first; a cell belongs to the latest command that
            names it. Without commands all cells of a baseline are one family.

    Returns:
        One row per cell (per cell, sweep and device where it was measured in several): `cell_id,
        baseline_cell_id, speedup, speedup_low, speedup_high, num_blocks` (blocks that hold both),
        `block_noise` (standard deviation of the log ratio of one block),
        `p_value, p_holm, claim, claim_low, claim_high` (the interval that belongs to the claim
        among the family), `family_size, speedup_note`. `claim` is a `stats.Claim`; `speedup_note` says
        why there is no speedup although the cell was measured.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    table = compare_rows(keyed(checked_runs(runs, "device"), baselines), families)
    return table.drop(columns="row").reset_index(drop=True)


def compare_rows(known: KeyedRuns, families: Families) -> DataFrame:
    """Return `speedup_over` of keyed runs, with `row`."""
    runs, baselines = known.runs, known.baselines
    facts = ["cell_id", "baseline_cell_id", "baseline", "others", "older", "is_listed"]
    table = known.rows[facts].rename_axis("row").reset_index()
    per_block = log_throughput_per_block(known.valid, ROW)
    ratios = log_ratios(per_block, baselines, ROW)
    anywhere = log_ratios(per_block.assign(nodes_used=None), baselines, ROW)[ROW].value_counts()
    together = ratios[ROW].value_counts()
    elsewhere = {
        row: say(
            "missing_blocks", whose=ITS_OWN, ended=OTHER_NODES, lost=lost, blocks=count(n, "block")
        )
        for row, n in anywhere.items()
        if (lost := n - together.get(row, n))
    }
    measured = set(runs.loc[runs["status"] == Status.measured, ROW])
    is_baseline = table["cell_id"] == table["baseline_cell_id"]
    measured_baselines = measured & set(table.loc[is_baseline, ROW])
    return (
        table.merge(estimate(ratios, ROW), on=ROW, how="left")
        .pipe(_with_screened, known)
        .pipe(_without_emulated, runs)
        .assign(speedup=lambda t: t["speedup"].mask(t[ROW].isin(measured_baselines), 1.0))
        .assign(num_blocks=lambda t: t["num_blocks"].fillna(0).astype(int))
        .pipe(_with_family, ratios, families)
        .pipe(_with_missing_blocks, runs)
        .assign(_elsewhere=lambda t: [elsewhere.get(row, "") for row in t[ROW]])
        .assign(claim=claims, speedup_note=lambda t: _notes(t, known))
        .loc[lambda t: t["is_listed"]]
        .drop(columns=["baseline", "others", "older", "is_listed"])
        .loc[:, lambda t: [not column.startswith("_") for column in t]]
    )


def _with_family(table: DataFrame, ratios: DataFrame, families: Families) -> DataFrame:
    """Add what depends on the family: `p_holm, claim_low, claim_high, family_size`."""
    columns = ["p_holm", "_level", "family_size"]
    found = np.full((len(table), len(columns)), np.nan)
    p_value = table["p_value"].to_numpy(float, na_value=np.nan)
    for rows in _families(table, families):
        found[rows, 0], found[rows, 1] = adjusted(p_value[rows])
        found[rows, 2] = len(rows)
    known = DataFrame(found, index=table.index, columns=columns)
    any_look = table[ROW].isin(any_look_keys(ratios, ROW))
    ends = interval(table.assign(any_look=any_look), known["_level"])
    return table.assign(
        p_holm=known["p_holm"],
        claim_low=ends["low"].where(known["p_holm"].notna()),
        claim_high=ends["high"].where(known["p_holm"].notna()),
        family_size=known["family_size"].astype("Int64"),
    )


def _families(table: DataFrame, families: Families) -> Iterator[Integers]:
    """Yield the rows of each family: the tested cells of one baseline that one command compared.

    A cell that several commands name is in the family of each, the latest of them last. Cells that no
    command names, and the only cell of a baseline, are families too.
    """
    tested = np.flatnonzero(table["p_value"].notna().to_numpy())
    base = factorize(table["baseline"])[0]
    size = np.bincount(base[tested] + 1, minlength=len(table) + 1)[base + 1]
    alone, rest = tested[size[tested] == 1], tested[size[tested] > 1]
    yield from alone[:, None]
    row_of: dict[str, list[int]] = {}
    for row, cell in zip(rest, table["cell_id"].iloc[rest], strict=True):
        row_of.setdefault(str(cell), []).append(row)
    unnamed = row_of.keys() - {cell for family in families for cell in family}
    for family in [*families, unnamed]:
        rows = np.array(sorted(row for cell in family for row in row_of.get(cell, ())), dtype=int)
        rows = rows[np.argsort(base[rows], kind="stable")]
        for group in np.split(rows, np.flatnonzero(np.diff(base[rows])) + 1):
            if len(group):
                yield group


def _without_emulated(table: DataFrame, runs: DataFrame) -> DataFrame:
    """Add `_emulated`, and take interval and p-value away where that is."""
    if EMULATE not in runs:
        return table.assign(_emulated=False)
    emulated = runs.loc[runs[EMULATE].eq(True), ROW]
    found = table[ROW].isin(emulated) | table["baseline"].isin(emulated)
    parts = ("speedup_low", "speedup_high", "p_value")
    return table.assign(_emulated=found, **{c: table[c].mask(found) for c in parts})


def _with_screened(table: DataFrame, known: KeyedRuns) -> DataFrame:
    """Add the ratio of screening runs to cells without another, and `_short`: the claim where that is all.

    Of screening runs it is the mean of the blocks.
    """
    runs = known.runs[known.runs["status"] == Status.measured]
    runs = runs[runs["block"].isin(runs.loc[is_screening(runs), "block"])]  # a baseline may count
    if runs.empty:
        return table.assign(_short="")
    status = runs[ROW].map(known.status.set_index(ROW)["status"])
    measured = log_throughput_per_block(runs[status == Status.measured], ROW)
    ratios = log_ratios(measured, known.baselines, ROW)
    by_row = ratios.groupby(ROW)["log_ratio"]
    chosen = set(runs.loc[runs["purpose"] == CHOOSING, ROW])
    latest = np.exp(by_row.last().mask(by_row.last().index.isin(chosen), by_row.mean()))
    found = table[ROW].map(latest).where(table["speedup"].isna())
    return table.assign(
        speedup=table["speedup"].fillna(found), _short=np.where(found.notna(), Claim.screened, "")
    )


EQUAL_WHEN_SCREENED = 1.05
"""A ratio below this is reported as equal, of a single short run."""
ENDED = {
    str(Status.measured): "had no throughput",
    str(Status.wrong): "was wrong",
    str(Status.diverged): "diverged",
    str(Status.timed_out): "timed out",
    str(Status.killed): "was killed",
    str(Status.out_of_memory): "ran out of memory",
    str(Status.failed): "failed",
}
"""Ends of runs that one run may meet more often than another: blocks without it are no random choice."""


Lost = Mapping[Any, Mapping[tuple[Any, ...], str]]
"""Cell -> block without a run of it that counts -> one of `ENDED`."""


def missing_blocks_of(runs: DataFrame, by: str = "cell_id") -> Lost:
    """Return the missing blocks of each cell: those whose run has no result because of how it ended.

    Args:
        runs: one row per run, as `checked_runs` returns them.
        by: column that identifies a cell.
    """
    full = runs[~is_screening(runs)]
    good = (full["status"] == Status.measured) & full["images_per_second"].notna()
    how = full["status"].astype(str).map(ENDED)
    full = full.assign(_good=good, _how=how)[full[by].isin(full.loc[how.notna() & ~good, by])]
    ended = full.groupby([by, "sweep", "block"], dropna=False).agg({"_good": "any", "_how": "last"})
    found: dict[Any, dict[tuple[Any, ...], str]] = {}
    for cell, sweep, block, good_, why in ended.reset_index().itertuples(index=False, name=None):
        if why == why and not good_:
            found.setdefault(cell, {})[sweep, block] = why
    return found


def is_biased(lost: Lost, cells: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether the cells miss blocks that the others have: the missing runs may be their slow ones."""
    own, theirs = ({b for cell in side for b in lost.get(cell, ())} for side in (cells, others))
    return bool(own - theirs)


def biased(up: Series, cells: Series, baselines: Series, lost: Lost) -> list[bool]:
    """Whether the faster side of each row misses blocks of the other; it is the cell where `up`."""
    sides = zip(up, cells, baselines, strict=True)
    return [is_biased(lost, *([c], [b]) if u else ([b], [c])) for u, c, b in sides]


def _with_missing_blocks(table: DataFrame, runs: DataFrame) -> DataFrame:
    """Add `_missing`, the note on missing blocks, and `_survivors`, see `biased`."""
    lost, up = missing_blocks_of(runs, ROW), table["speedup"] > 1
    if not lost:
        return table.assign(_missing="", _survivors=False)
    of_all = runs[runs[ROW].isin(lost) & ~is_screening(runs)].groupby(ROW)["block"].nunique()
    paired = (table["num_blocks"] > 0) & (table["cell_id"] != table["baseline_cell_id"])
    said = [
        "; ".join(
            say(
                "missing_blocks",
                whose=whose,
                ended=" or ".join(sorted(set(lost[row].values()))),
                lost=len(lost[row]),
                blocks=count(of_all[row], "block"),
            )
            for whose, row in ((ITS_OWN, mine), (ITS_BASELINE, other))
            if shown and row in lost
        )
        for mine, other, shown in zip(table[ROW], table["baseline"], paired, strict=True)
    ]
    return table.assign(_missing=said, _survivors=biased(up, table[ROW], table["baseline"], lost))


def _notes(table: DataFrame, known: KeyedRuns) -> Series:
    base = table["baseline"]
    compared = base.notna() & (table["baseline_cell_id"] != table["cell_id"])
    without_pairs = table[compared & (table["num_blocks"] == 0)]
    earlier = compared & base.map(known.rows["is_earlier"]).eq(True)
    others = table["others"].where(compared & ~earlier, 0)
    older = table["older"].where(compared, 0)
    codes, own_codes = (
        number.map(
            lambda n, w=whose: say("other_code", whose=w, blocks=count(n, "block")) if n else ""
        )
        for number, whose in ((others, ITS_BASELINE), (older, ITS_OWN))
    )
    codes = codes.mask(earlier, say("earlier_baseline"))
    sizes = other_size(known)
    own_sizes = table[ROW].map(lambda row: sizes.get(row, ""))
    windows = windows_of(known.valid, ROW)
    sides = zip(table[ROW].map(windows), base.where(compared).map(windows), strict=True)
    apart = [timed_apart(own, other, ITS_BASELINE) for own, other in sides]
    lost = table["_missing"], table["_elsewhere"]
    told = zip(codes, own_codes, *lost, own_sizes, apart, strict=True)
    noted = Series(["; ".join(filter(None, some)) for some in told], table.index, dtype=object)
    if without_pairs.empty:
        return noted
    status = known.status.set_index(ROW)["status"].map(str).to_dict()
    devices = _devices(known.runs)

    def note(row: int, cell: str, baseline: str, base_row: int, speedup: float, short: str) -> str:
        if short:
            return "; ".join(filter(None, [screened(speedup), sizes.get(row)]))
        if status.get(row) != Status.measured:
            return ""
        elsewhere = sorted(devices.get(baseline, set()) - devices.get(cell, set()))
        other = status.get(base_row, "never run")
        if elsewhere and other in ("never run", Status.measured):
            why = f"ran on {', '.join(elsewhere)}"
        elif other == "never run":
            why = "was measured elsewhere" if devices.get(baseline) else "never ran"
        elif other != Status.measured:
            why = ENDED.get(other, f"is {other.replace('_', ' ')}")
        else:
            return say("no_speedup", why=NO_PAIR)
        return say("no_speedup", why=f"{ITS_BASELINE} {why}")

    names = (ROW, "cell_id", "baseline_cell_id", "baseline", "speedup", "_short")
    columns = (without_pairs[c] for c in names)
    notes = [note(*row) for row in zip(*columns, strict=True)]
    found = Series(notes, without_pairs.index, dtype=object).reindex(table.index)
    return found.mask(earlier).fillna(noted)


def further(row: Mapping[Any, Any] | Series) -> str:
    """Return what the note of a row says next to its ratio and claim."""
    note = plain(row["speedup_note"])
    return note.partition("; ")[2] if row["claim"] == Claim.screened else note


def screened(speedup: float, other: str = "") -> str:
    """Say what screening shows: `about 0.029x as fast (screening run, no interval)`, `as fast as` another."""
    return say("screened", about=about(speedup) + f" as {other}" * bool(other))


def about(speedup: float) -> str:
    """Say what one ratio shows: `about 0.37x as fast`, `about 2.1x as fast` or `about as fast`."""
    is_equal = max(speedup, 1 / speedup) < EQUAL_WHEN_SCREENED
    return f"about {'' if is_equal else f'{number(speedup, 2)}x '}as fast"


def _devices(runs: DataFrame) -> dict[str, set[str]]:
    """Return the devices on which each cell was measured."""
    good = runs[(runs["status"] == Status.measured) & runs["device"].notna()]
    found: dict[str, set[str]] = {}
    for cell, device in dict.fromkeys(zip(good["cell_id"], good["device"], strict=True)):
        if device:
            found.setdefault(str(cell), set()).add(str(device))
    return found
