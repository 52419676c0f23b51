"""Published figures with their sources, and how to show them beside measured rows."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from io import StringIO

import pandas as pd
from pandas import DataFrame

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
