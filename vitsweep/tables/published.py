"""Published figures with their sources, and how to show them beside measured rows."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from io import StringIO

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.formatting import plain
from vitsweep.tables.names import varying_columns
from vitsweep.tables.valid_runs import checked_cells

SURENESS = {
    "primary": "text of the repository, pull request, README or paper itself",
    "primary_image": "a table or labelled chart published as an image, transcribed by eye",
    "secondary": "a translation, reading notes or a review that quotes the source",
    "abstract_only": "only the abstract was available",
    "digitised": "measured off a plot without value labels, about 2 % off",
}
"""Values of the column `sure`, the most reliable first."""

_GPUS = re.compile(r"^(\d+)x([A-Za-z]\w*(?:-\w+)*)")
_NAMED = re.compile(r"^([A-Za-z_]+)[ =](\d[\w.]*)$")
_COUNT = re.compile(r"^([\d,]+) (?:GPUs?|AMD \w+|H100|V100)\b")


def published(
    source: str = "", experiment: str = "", metric: str = "", doubtful: bool = False
) -> DataFrame:
    """Return published figures: `source, system, experiment, metric, value, number, unit, ...`.

    `value` is the text as printed, `number` its value where it is a plain number. `sure` is a key
    of `SURENESS`, `where` names the place that was read. Figures whose labels are doubtful in
    their own source are left out unless `doubtful`; then `doubt` says why.

    Args:
        source: regular expression that the source must contain; the same for the next two.
        experiment: as `source`.
        metric: as `source`.
        doubtful: return doubtful figures as well.
    """
    table = _all()
    for column, pattern in (("source", source), ("experiment", experiment), ("metric", metric)):
        table = table[table[column].str.contains(pattern, regex=True)]
    return (table if doubtful else table[table["doubt"].isna()]).reset_index(drop=True)


def with_conditions(table: DataFrame) -> DataFrame:
    """Add the conditions as columns: `gpus, gpu` and every `name value` of the text.

    A length such as `64K` becomes 65,536: taken in powers of two, which the sources do not state.
    """
    parsed = DataFrame([conditions(text) for text in table["conditions"]], index=table.index)
    return table.join(parsed[[c for c in parsed if c not in table]])


def conditions(text: str) -> dict[str, str | int]:
    """Return `{gpus: 16, gpu: A800, seq: 65536, tp: 1}` from `16xA800 (2 nodes); seq 64K; tp 1`."""
    found: dict[str, str | int] = {}
    for part in map(str.strip, text.split(";")):
        if match := _GPUS.match(part):
            found |= {"gpus": int(match[1]), "gpu": match[2]}
        elif match := _COUNT.match(part):
            found |= {"gpus": int(match[1].replace(",", ""))}
        elif match := _NAMED.match(part):
            found[match[1]] = _whole(match[2])
    return found


def beside(measured: DataFrame, figures: DataFrame, on: Sequence[str]) -> DataFrame:
    """Join figures to measured rows with the same values of `on`; rows without a partner stay.

    A cell is empty where nothing was published or nothing was measured. The columns of `figures`
    get the prefix `published_`.
    """
    renamed = figures.rename(columns={c: f"published_{c}" for c in figures if c not in on})
    return measured.merge(renamed, on=list(on), how="outer", sort=False)


@cache
def _all() -> DataFrame:
    text = files("vitsweep.tables").joinpath("published.csv").read_text(encoding="utf-8")
    table = pd.read_csv(StringIO(text), dtype=str).assign(
        conditions=lambda t: t["conditions"].fillna(""), unit=lambda t: t["unit"].fillna("")
    )
    return table.assign(number=pd.to_numeric(table["value"], errors="coerce"))


def _whole(text: str) -> str | int:
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]] if match else text


# Memory of a rank by part, beside the cost table of USP (arXiv:2405.07719, table 2).


PARTS = ("parameter_gib", "gradient_gib", "optimizer_state_gib", "activation_gib")
GATHERED = "gathered_parameter_gib"

SYSTEMS = {
    ("none", "none", "ddp"): "DP",
    ("none", "none", "zero1"): "ZeRO1",
    ("ulysses", "none", "ddp"): "SP-Ulysses",
    ("ring", "none", "ddp"): "SP-Ring",
    ("usp", "none", "zero1"): "USP+ZeRO1",
    ("usp", "none", "zero2"): "USP+ZeRO2",
    ("usp", "none", "fsdp"): "USP+ZeRO3",
    ("none", "megatron", "ddp"): "TP",
    ("megatron_sp", "none", "ddp"): "TP-sp",
}
"""(sequence_parallel, tensor_parallel, sharding) -> the name of the method in the paper's table."""


PARAMETERS = {"P+G": (False, False), "P+G/N": (False, True), "(P+G)/N": (True, True)}
STATE = {"6P": False, "6P/N": True}
ACTIVATIONS = {"A/N": True}  # `alpha A` of TP is between A/N and A

SAME = (
    "model", "data", "precision", "optimizer", "layout", "classifier", "attention", "memory",
    "compilation", "images_per_step", "num_tokens", "accumulation_steps", "model.depth",
    "model.width", "model.mlp_width", "half_dtype",
)  # fmt: skip
"""Columns that a cell has in common with the single-rank cell whose memory is not split."""


def memory_parts(cells: DataFrame) -> DataFrame:
    """Return the measured parts of a rank's memory, and the published formulas evaluated for them.

    `published_...` are the formulas as printed: P parameters, G gradients, 6P the optimizer state
    where P is in 16 bit (a float32 copy and two moments of Adam), A activations, N ranks, alpha what
    TP does not split. `expected_...` puts in P, G, A and the optimizer state of the cell with the
    same model, batch and precision on one rank: empty where that was not measured, or nothing is
    published. Where ranks differ the worst is shown. `gathered_parameter_gib` comes on top while
    blocks are computed: ZeRO-2 holds shards here and gathers all, where the paper's keeps P.
    """
    cells = checked_cells(cells, "world_size", "sequence_parallel", "tensor_parallel", "sharding")
    known = [part for part in PARTS if part in cells]
    measured = cells[cells["status"] == Status.measured].dropna(subset=known, how="all")
    if not known or measured.empty:
        return DataFrame(columns=["cell_id", *PARTS])
    measured = measured.reindex(columns=list(dict.fromkeys([*measured.columns, *PARTS])))
    formulas = _formulas()
    wholes = _wholes(measured)
    rows = [_row(row, formulas, wholes.get(_key(row))) for _, row in measured.iterrows()]
    columns = list(dict.fromkeys([*varying_columns(cells), "world_size"]))
    columns += [GATHERED] * (GATHERED in measured)
    return pd.concat(
        [measured[["cell_id", *columns, *PARTS]], DataFrame(rows, index=measured.index)], axis=1
    )


def _formulas() -> DataFrame:
    """Return table 2 of the paper by method: one row each, with where it was read."""
    printed = published(r"^USP .*Table 2$", "memory_cost")
    formulas = printed.pivot(index="system", columns="metric", values="value")
    return formulas.assign(source=printed["source"].iloc[0], sure=printed["sure"].iloc[0])


def _row(row: Series, formulas: DataFrame, whole: Series | None) -> dict[str, object]:
    techniques = (row["sequence_parallel"], row["tensor_parallel"], row["sharding"])
    system = SYSTEMS.get(tuple(plain(t) for t in techniques))  # type: ignore[arg-type]
    if system is None:
        return {}
    printed = Series(formulas.loc[system])
    found: dict[str, object] = {
        "published_system": system,
        "published_parameters_and_gradients": printed["param+grad"],
        "published_optimizer_state": printed["optimizer_state"],
        "published_activations": printed["activation"],
        "published_source": f"{printed['source']} ({printed['sure']})",
    }
    if whole is not None:
        ranks = float(row["world_size"])
        for part, is_split in zip(PARTS, _splits(printed), strict=True):
            if is_split is not None:
                found[f"expected_{part}"] = float(whole[part]) / (ranks if is_split else 1.0)
    return found


def _splits(printed: Series) -> tuple[bool | None, ...]:
    """Return which of `PARTS` are split over the ranks; None where the formula does not say."""
    of_parameters = PARAMETERS[printed["param+grad"]]
    return *of_parameters, STATE[printed["optimizer_state"]], ACTIVATIONS.get(printed["activation"])


def _wholes(measured: DataFrame) -> dict[tuple[str, ...], Series]:
    """Return the cells on one rank, by what others share with them."""
    alone = measured[measured["world_size"] == 1]
    return {_key(row): row for _, row in alone.iterrows()}


def _key(row: Series) -> tuple[str, ...]:
    return tuple(plain(row.get(column)) for column in SAME)
