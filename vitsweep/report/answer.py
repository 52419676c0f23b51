"""The result of a sweep in one sentence per baseline, and what to type next."""

from dataclasses import dataclass
from html import escape
from math import ceil, log

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import bounds as bounds_chart
from vitsweep.charts import causes, style
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import sweep_argument
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import choices, plain_choice
from vitsweep.tables import formatting
from vitsweep.tables.causes import Explanation, explain_cells, find_cell
from vitsweep.tables.names import MANY, named, names_by_id, varying_columns, with_changes
from vitsweep.tables.roofline import Bounds, bounds, traced_cells
from vitsweep.tables.speedup import ITS_RATIO, one_look
from vitsweep.tables.stats import Claim, is_inconclusive
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells, row_keys

UNKNOWN = Series({"images_per_second": float("nan")})
"""A baseline that the table does not have."""
COMPARED = (
    "sweep device images_per_second speedup speedup_low speedup_high claim num_pairs "
    "block_noise baseline_cell_id speedup_note any_look"
).split()
NOISY = 0.1
"""Noise of one block's ratio above which a sweep without a difference is called inconclusive."""
LEAST_DIFFERENCE = 0.02
"""Smaller differences are not worth the blocks that would show them."""
CLEAR = 1.01
"""Lower end of a speedup's interval above which no further block is named."""
NEAR_LOOK = 0.5
"""Ratio of a look above which a cell stays at it only because the time of the command was over."""
MOST_BLOCKS = 60
TRY = {
    "cpu": (
        "optimizer=adamw_foreach,adamw_fused", "sharding=ddp,zero1", "layout=batch_first,batch_second",
        "attention=sdpa_auto,mha_module", "compilation=eager,compile_blocks",
    ),
    "cuda": (
        "precision=O1,O2,bf16", "compilation=eager,compile_blocks", "optimizer=adamw_foreach,adamw_fused",
        "attention=sdpa_flash,sdpa_cudnn", "sharding=ddp,fsdp,zero1",
    ),
}  # fmt: skip
"""Choices to try where nothing has beaten the baseline, the likeliest first."""
MOST = 8
"""The sentences are limited to this many baselines; the table shows all."""


def question(cells: DataFrame, replicated: str = "") -> str:
    """Return a question for a sweep that has none (`sweep.question`); repetitions are no choice."""
    groups = [c.replace("_", " ") for c in varying_columns(cells) if c != replicated]
    what = f"combination of {', '.join(groups)}" if groups else "setting"
    what = "combination of techniques" if len(groups) > MANY else what
    return f"Which {what} trains {formatting.distinct(cells, 'model') or 'the model'} fastest?"


def answers(cells: DataFrame) -> list[str]:
    """Return one sentence per baseline, or one for the sweep where there is none."""
    cells = checked_cells(cells, *COMPARED)
    measured = cells[cells["status"] == Status.measured]
    names = names_by_id(cells)
    if measured.empty:
        return [f"Nothing was measured: {formatting.tally(cells['status'])}."]
    compared = measured[measured["speedup"].notna() & (measured["claim"] != Claim.baseline)]
    lost = _without_speedups(measured, compared, names)
    if compared.empty:
        return [_fastest(measured, names), *lost][:MOST]
    if same := _the_same_everywhere(compared, cells):
        return [same, *lost][:MOST]
    bases = {k: row for k, (_, row) in zip(row_keys(measured), measured.iterrows(), strict=True)}
    keys = row_keys(compared, "baseline_cell_id")
    groups = compared.groupby(keys, sort=False)
    where = len({key[1:] for key in keys}) > 1
    found = [_over_baseline(group, bases.get(key, UNKNOWN), names, where) for key, group in groups]
    return [*lost, *found][:MOST]


def _without_speedups(measured: DataFrame, compared: DataFrame, names: dict[str, str]) -> list[str]:
    """Return what has no speedup, with the reason: all cells of a baseline, or the one of most images/s."""
    noted = measured[measured["speedup"].isna() & measured["speedup_note"].fillna("").ne("")]
    keys = row_keys(noted, "baseline_cell_id")
    alone = ~keys.isin(row_keys(compared, "baseline_cell_id"))
    found = []
    for _, rows in noted[alone].groupby(keys[alone], sort=False):
        note, base = str(rows["speedup_note"].iloc[0]), rows["baseline_cell_id"].iloc[0]
        if formatting.missing(base):
            found.append(f"{note[:1].upper()}{note[1:]}.")
            continue
        found.append(
            f"No speedup over {_the_baseline(names.get(base, ''))}: "
            f"{formatting.count(len(rows), 'cell')} measured, of which "
            f"{names[rows['cell_id'].iloc[0]]} has {note}."
        )
    most = noted[~alone].nlargest(1, "images_per_second")
    for _, row in most[most["images_per_second"] > compared["images_per_second"].max()].iterrows():
        speed = f"{formatting.number(row['images_per_second'])} img/s"
        found.append(
            f"{names[row['cell_id']]} has the highest throughput, {speed}, but {row['speedup_note']}."
        )
    return found


def _the_same_everywhere(compared: DataFrame, cells: DataFrame) -> str:
    """Return one sentence where several baselines have the same answer, else nothing."""
    changes = dict(zip(*(with_changes(cells)[c] for c in ("cell_id", "changes")), strict=True))
    keys = row_keys(compared, "baseline_cell_id")
    best = compared.loc[compared["speedup"].groupby(keys).idxmax()]
    found = {changes.get(cell, frozenset()) for cell in best["cell_id"]}
    if len(best) < 2 or len(found) > 1 or (best["claim"] != Claim.faster).any():
        return ""
    ends = formatting.span(best["speedup"], formatting.times)
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
    name, against = names[best["cell_id"]], _the_baseline(names.get(base_id, ""))
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
        Claim.probably_faster: f"{name} is probably faster than {against}: {size}, {rates}"
        f"{selected}; among all cells its interval holds 1.",
        Claim.slower: f"Nothing beat {against}; the nearest is {name}, {size}.",
        Claim.probably_slower: f"Nothing beat {against}; the nearest is {name}, {size}.",
        Claim.blocks_lost: f"{name} {_rank(best)}: {size} against {against}, {rates}; "
        f"{best['speedup_note']}, so nothing is claimed.",
        Claim.too_few_blocks: f"{name} {_rank(best)}: {size} against {against}, {rates}; "
        "fewer than 3 blocks, so nothing is claimed.",
    }
    unshown = (
        f"No cell is shown to beat {against}. The nearest is {name}, {size}: no difference shown"
        f"{selected}."
    )
    if best["block_noise"] > NOISY and best["claim"] == Claim.no_difference_shown:
        notes = str(best["speedup_note"] or "").split("; ")
        why = (
            f"the noise of this machine is {100 * best['block_noise']:.0f} % (of one block's ratio)"
        )
        why = next((note for note in notes if note.startswith(ITS_RATIO)), why)
        unshown = f"Inconclusive: {why}. {unshown}"
    elif is_inconclusive(best):
        blocks = formatting.count(best["num_pairs"], "block")
        unshown = f"Inconclusive: {blocks} leave a wide interval. {unshown}"
    return sentences.get(best["claim"], unshown)


def next_command(cells: DataFrame, typed: str) -> str:
    """Return a sentence with the command that makes the answer surer, or finds a faster cell.

    Args:
        cells: of one command, one row each.
        typed: that command.

    Returns:
        Empty where the fastest cell is known, and clearly faster than its baseline.
    """
    measured = checked_cells(cells, *COMPARED)
    measured = measured[(measured["status"] == Status.measured) & measured["speedup"].notna()]
    compared = measured[~measured["claim"].isin([Claim.baseline, Claim.one_look])]
    best = compared.nlargest(1, "speedup")
    if len(best) and best["claim"].iloc[0] in (Claim.faster, Claim.probably_faster):
        is_clear = best["claim"].iloc[0] == Claim.faster and best["speedup_low"].iloc[0] >= CLEAR
        return "" if is_clear else _surer(best.iloc[0], typed)
    if len(best) and best["claim"].iloc[0] == Claim.blocks_lost:
        return ""
    unsure = compared[compared["claim"].isin([Claim.no_difference_shown, Claim.too_few_blocks])]
    if len(unsure):
        return _surer(unsure.nlargest(1, "speedup").iloc[0], typed)
    looks = measured[measured["claim"] == Claim.one_look]
    if (looks["speedup"] > NEAR_LOOK).any():
        return f"Not decided yet, the same command goes on: `{typed}`."
    return f"Try next: `{_untried(measured)}`." if len(measured) > 1 else ""


def _surer(best: Series, typed: str) -> str:
    """Return the command that gives the cell more blocks: as many as show its present difference."""
    if not formatting.missing(best["any_look"]) and best["any_look"]:
        return f"To be surer, the same command goes on: `{typed}`."
    difference, done = max(abs(log(best["speedup"])), LEAST_DIFFERENCE), int(best["num_pairs"])
    half, wanted = log(best["speedup_high"] / best["speedup"]), 2 * done
    if half == half:
        wanted = ceil(done * (half / difference) ** 2)
    if wanted > MOST_BLOCKS:
        return (
            "To be surer, close other programs and repeat it: at this noise a difference so small takes "
            f"{wanted} blocks."
        )
    words = [w for w in typed.split() if not w.startswith("measurement.blocks=")]
    return f"To be surer: `{' '.join(words)} measurement.blocks={max(wanted, done + 3)}`."


def _untried(cells: DataFrame) -> str:
    """Return a sweep over the first group of `TRY` that the cells do not vary."""
    device = "cuda" if (cells.get("device_type", Series(dtype=object)) == "cuda").any() else "cpu"
    tried = {group for group in GROUPS if group in cells and cells[group].nunique() > 1}
    for text in TRY[device]:
        if text.partition("=")[0] not in tried:
            models = [str(name) for name in cells.get("model", Series(dtype=object)).unique()]
            named = (
                [f"model={models[0]}"] if len(models) == 1 and models[0] in choices("model") else []
            )
            kept = [word for word in named if word != f"model={plain_choice('model')}"]
            return " ".join(["python -m vitsweep -m", text, *kept])
    return "python -m vitsweep -m +sweep=one_at_a_time"


def _selected(best: Series) -> str:
    """Return the figure without the bias of having selected the best of several cells.

    Its interval is the one of the claim, which holds whichever cell is selected.
    """
    size = formatting.whole(best.get("family_size"))
    adjusted = formatting.times(best.get("selection_adjusted_speedup"))
    if not adjusted or size in ("", "1"):
        return ""
    ends = formatting.ratio(best["speedup"], best["claim_low"], best["claim_high"]).partition(" ")[
        2
    ]
    return f"; {f'{adjusted} {ends}'.strip()} after correction for being the best of {size} cells"


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
    return f"the {name}" if name.startswith("baseline") else f"the baseline {name}".rstrip()


# Why one cell of a sweep is faster than another, as table, figure and sentence.


@dataclass(frozen=True, eq=False)
class Explained:
    """Why one cell is faster than another, or where its time goes, as table, figure and sentence.

    Attributes:
        explanation: `tables.causes.Explanation` of two cells, `tables.roofline.Bounds` of one.
        store: where the runs are.
    """

    explanation: Explanation | Bounds
    store: Store

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return self.explanation.sentence

    @property
    def table(self) -> DataFrame:
        """One row per cause or class: milliseconds per step with a 95 % interval."""
        return self.explanation.causes

    @property
    def figure(self) -> Figure | None:
        """The picture of causes; None for one cell on a device whose rates are unknown."""
        if isinstance(self.explanation, Explanation):
            return style.freeze_layout(causes.draw(causes.rows_of([self.explanation])))
        rows = bounds_chart.rows_of([self.explanation])
        return style.freeze_layout(bounds_chart.draw(rows)) if len(rows) else None

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        drawn = style.to_svg(self.figure) if self.figure else ""
        return f"<p>{escape(self.sentence)}</p>{drawn}"


def explain_cell(store: Store, a: str) -> Explained:
    """Return how far each class of a cell's time is from the bound of its work, from stored traces.

    Raises:
        BadValueError: the text names no cell of the sweep, or several.
        VitsweepError: the cell has no traced steps; the text says which command measures some.
    """
    tables = SweepTables.of(store)
    cell_id = find_cell(tables.cells, a)
    if cell_id not in traced_cells(tables):
        raise VitsweepError(
            f"`{a}` has no traced steps in `{store.name}`: `python -m vitsweep explain '{a}' B "
            f"--sweep {sweep_argument(store)}`, with another cell B, measures some of both."
        )
    names = names_by_id(tables.cells)
    return Explained(bounds(tables, cell_id, names[cell_id]), store)


def explain_stored(store: Store, a: str, b: str, least_blocks: int = 1) -> Explained | None:
    """Return why cell A is faster than cell B from stored traces alone; None where blocks lack.

    Raises:
        BadValueError: a text names no cell of the sweep, or several.
    """
    tables = SweepTables.of(store)
    first, second = (find_cell(tables.cells, text) for text in (a, b))
    if first == second:
        raise BadValueError(f"`{a}` and `{b}` are the same cell of `{store.name}`.")
    labels = names_by_id(tables.cells)
    try:
        found = explain_cells(tables, first, second, (labels[first], labels[second]))
    except VitsweepError:
        return None
    return Explained(found, store) if found.num_blocks >= least_blocks else None


def lacking(store: Store, a: str, b: str) -> VitsweepError:
    """Return the error of a pair whose traces lack, with the command that measures them."""
    return VitsweepError(
        f"No block of `{store.name}` has traced steps of both `{a}` and `{b}`: `python -m vitsweep explain "
        f"'{a}' '{b}' --sweep {sweep_argument(store)}` measures some."
    )
