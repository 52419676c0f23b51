"""What a paper says of a sweep: tables, figures, a methods paragraph, a bibliography, a checklist."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import dates, ranks
from vitsweep.errors import VitsweepError
from vitsweep.files import write_atomically
from vitsweep.report.answer import answers
from vitsweep.report.figures import drawn
from vitsweep.results.metrics import FLAGS, headings
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, distinct, number, span, tally
from vitsweep.tables.names import name_parts
from vitsweep.tables.render import cell_text
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

WIDTHS = {
    "neurips": (5.5, 5.5),
    "iclr": (5.5, 5.5),
    "icml": (3.25, 6.75),
    "cvpr": (3.25, 6.875),
    "ieee": (3.5, 7.16),
}
"""Venue -> width of a column and of the page's text, in inches, as its style file sets them."""
METHODS = ("paszke2019pytorch", "student1908", "holm1979", "vitsweep")
_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "·": r"$\cdot$", "…": r"\ldots{}", "±": r"$\pm$", "²": r"$^2$", "—": "---", "\xa0": "~",
    **{c: rf"{{\fontencoding{{T1}}\selectfont {c}}}" for c in "ĄąĘęĮįŲųÐðÞþĐđŊŋ«»„\u201a\u2039\u203a"},
}  # fmt: skip
_LATIN = re.compile("[\n -~]|(?![ĦħĸĿŀŉŦŧ])[\u00a1-ž\u2013\u2018\u2019“”•™€←↑→↓]")
"""What LaTeX shows as it stands, in every font encoding."""
_UNKNOWN = re.compile(r"\\texttt\{U\+(\w+)\}")


def tex(text: object) -> str:
    """Return a text as pdfLaTeX shows it, in UTF-8; a factor such as `1.27x` with its sign.

    A character that it does not know, such as a Chinese one, is written as its code point.
    """
    composed = unicodedata.normalize("NFC", str(text))
    plain = "".join(_SPECIAL.get(c, c if _LATIN.match(c) else _code_point(c)) for c in composed)
    return re.sub(r"(?<=\d)x\b", r"$\\times$", plain)


def _code_point(character: str) -> str:
    return rf"\texttt{{U+{ord(character):04X}}}"


def without_letters(texts: Iterable[str]) -> list[str]:
    """Return the names of the characters that `tex` has written as code points."""
    codes = sorted({code for text in texts for code in _UNKNOWN.findall(text)})
    return [f"U+{c} {unicodedata.name(chr(int(c, 16)), 'without a name')}" for c in codes]


@dataclass(frozen=True)
class Used:
    """What a sweep took, over all of its runs.

    Attributes:
        runs: that have a record.
        timed_runs: of them those that say how long they took; hours are theirs.
        gpu_hours: of ranks on GPUs; None where there is none.
        rank_hours: of ranks on any device.
        cost: of the GPU hours; None without a price.
        energy_kwh: of all GPUs in the timed windows, by NVML's counter; None where none says.
    """

    runs: int
    timed_runs: int
    gpu_hours: float | None
    rank_hours: float | None
    cost: float | None
    energy_kwh: float | None


def used(runs: DataFrame, price_per_gpu_hour: float | None = None) -> Used:
    """Add up what all runs took, looks and runs of other code included; what is unknown stays unknown."""
    empty = Series(float("nan"), runs.index, dtype=float)
    hours = (runs.get("run_seconds", empty) * runs["world_size"]).astype(float) / 3600
    on_gpu = runs.get("device_type", empty) == "cuda"
    energy = runs.get("window_energy_j", empty)[runs["status"] == Status.measured].astype(float)
    gpu_hours = _sum(hours[on_gpu])
    priced = gpu_hours is not None and price_per_gpu_hour is not None
    joules = _sum(energy)
    return Used(
        len(runs),
        int(hours.notna().sum()),
        gpu_hours,
        _sum(hours),
        gpu_hours * price_per_gpu_hour if priced else None,  # type: ignore[operator]
        joules / 3.6e6 if joules is not None else None,
    )


def _sum(values: "Series[float]") -> float | None:
    return float(values.sum()) if values.notna().any() else None


def write_paper(
    tables: SweepTables,
    folder: Path,
    cited: Iterable[str],
    *,
    venue: str = "icml",
    price_per_gpu_hour: float | None = None,
    currency: str = "USD",
) -> tuple[list[str], list[str]]:
    """Write what a paper says of a sweep; `paper.tex` shows all of it.

    Args:
        tables: of one sweep.
        folder: is made; files of an earlier call are replaced.
        cited: keys of `references.bib`.
        venue: key of `WIDTHS`.
        price_per_gpu_hour: for the cost; None leaves it empty.
        currency: of the price.

    Returns:
        The names of the files, and of the characters that LaTeX has no letter for.

    Raises:
        VitsweepError: nothing was measured.
    """
    cells = tables.settings
    measured = cells[cells["status"] == Status.measured] if len(cells) else cells
    if measured.empty:
        raise VitsweepError(
            "The sweep has no measured cell: there is nothing to write a paper about."
        )
    keys = sorted({*METHODS, *cited, *(["wang2023anytime"] if _any_look(measured) else [])})
    spent = used(tables.every_run, price_per_gpu_hour)
    facts = _facts(tables, measured, spent) | {"keys": keys, "currency": currency}
    column, page = WIDTHS[venue]
    facts |= {"column_inches": column, "text_inches": page, "is_two_columns": column < page}
    figures = _figures(tables, folder, venue)
    texts = {
        name: _rendered(name, facts | {"figures": figures})
        for name in ("methods.tex", "compute.tex", "checklist.tex", "paper.tex")
    }
    text = cell_text(cells)
    shown = text.assign(
        status=text["status"].astype(str).str.split(r"[:;(]", regex=True).str[0].str.strip()
    )
    parts = name_parts(cells).loc[text.index]  # settings of the baselines head their rows
    shown, under = shown.assign(cell=parts["change"]), parts["match"]
    texts |= {
        "results.tex": booktabs(shown.replace("", "--"), under),
        "references.bib": bibliography(keys),
    }
    for name, content in texts.items():
        write_atomically(folder / name, f"{content.rstrip()}\n")
    images = (f"figures/{f['file']}.{kind}" for f in figures for kind in ("pdf", "svg"))
    return [*texts, *images], without_letters(texts.values())


def booktabs(text: DataFrame, under: "Series[str]") -> str:
    """Return a table of text as a `tabular` of the package booktabs, no wider than its column.

    Args:
        text: of the cells, row by row.
        under: heading of each row; rows of one heading stand together.
    """
    numeric = headings(text)
    columns = "".join("r" if name in numeric else "l" for name in text)
    lines = [
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(tex, text.columns)) + r" \\",
        r"\midrule",
    ]
    for heading, rows in text.astype(str).groupby(under, sort=False):
        if heading:
            wide = rf"\multicolumn{{{len(columns)}}}{{l}}{{\emph{{{tex(heading)}}}}} \\"
            lines += [r"\addlinespace", wide]
        lines += [" & ".join(map(tex, row)) + r" \\" for row in rows.itertuples(index=False)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}"]) + "\n"


def bibliography(keys: Sequence[str]) -> str:
    """Return the entries of `references.bib` with these keys.

    Raises:
        VitsweepError: there is no such entry.
    """
    text = files("vitsweep.extras.paper").joinpath("references.bib").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^(?=@\w+\{([^,]+),)(.*?^\}\n)", text, re.DOTALL | re.MULTILINE))
    if unknown := [key for key in keys if key not in entries]:
        raise VitsweepError(f"`references.bib` has no entry {', '.join(unknown)}.")
    return "\n".join(entries[key] for key in keys)


def _figures(tables: SweepTables, folder: Path, venue: str) -> list[dict[str, Any]]:
    """Write every chart as PDF and SVG as wide as a column, or as the text where its labels need that."""
    column, text = WIDTHS[venue]
    found: dict[str, dict[str, Any]] = {}
    for inches in dict.fromkeys((column, text)):
        for chart, figure, reading in drawn(tables, partial(style.to_width, inches=inches)):
            file = f"{chart.name}{'_wide' if inches > column else ''}"
            write_atomically(folder / "figures" / f"{file}.pdf", style.to_pdf(figure))
            write_atomically(folder / "figures" / f"{file}.svg", style.to_svg(figure, letters=True))
            shown = {
                "file": file,
                "is_wide": inches > column,
                "title": chart.title,
                "caption": f"{reading} {style.caption(tables.settings)}.",
            }
            found.setdefault(chart.name, shown)
    return [*found.values()]


def _any_look(cells: DataFrame) -> bool:
    return bool(cells["any_look"].eq(True).any()) if "any_look" in cells else False


def _facts(tables: SweepTables, measured: DataFrame, spent: Used) -> dict[str, Any]:
    """Return what the templates say, from what was really done."""
    cells, runs = tables.settings, tables.runs
    compared = measured[measured["speedup_low"].notna()].fillna({"num_pairs": 0})
    unmeasured = tables.every_run[tables.every_run["status"] != Status.measured]
    if "git_commit" in measured:
        measured = measured.assign(git_commit=measured["git_commit"].str[:12])
    claims = measured["claim"].astype(str).value_counts().to_dict()
    said = [c for c in Claim if c not in (Claim.baseline, Claim.nothing) and claims.get(str(c))]
    return {
        "answers": answers(tables),
        "num_cells": len(cells),
        "num_measured": len(measured),
        "unmeasured": tally(cells.loc[cells["status"] != Status.measured, "status"]),
        "num_compared": len(compared),
        "blocks": _range(compared, "num_pairs"),
        "by_blocks": sorted(Counter(compared["num_pairs"].astype(int)).items()),
        "failed_runs": tally(unmeasured["status"]),
        "claims": [(claim, claims[str(claim)]) for claim in said],
        "is_any_look": _any_look(measured),
        "proved": int(measured["proved"].astype(str).str.startswith("twin").sum())
        if "proved" in measured
        else 0,
        "flags": [
            (flag.caption, int(n))
            for name, flag in FLAGS.items()
            if name in measured and (n := measured[name].eq(True).sum())
        ],
        "seeds": _range(measured, "seed"),
        "values": {
            name: distinct(measured, name)
            for name in ("model", "data", "device", "torch", "cuda", "nccl", "driver", "python", "cpu",
                         "git_commit", "optimizer", "task")
        },
        "ranks": ranks(measured),
        "images": _range(measured, "images_per_step"),
        "pixels": _range(measured, "resolution_px"),
        "parts": _range(measured, "accumulation_steps"),
        "window": _range(runs.round(1), "window_seconds"),
        "steps": _range(runs, "steps_counted"),
        "is_dirty": "git_dirty" in measured and bool(measured["git_dirty"].eq(True).any()),
        "dates": dates(measured),
        "accuracy": int(measured["accuracy_top1"].notna().sum()) if "accuracy_top1" in measured else 0,
        "used": spent,
        "sweep": tables.stores[0].name if tables.stores else "",
    }  # fmt: skip


def _range(table: DataFrame, column: str) -> str:
    """Return `5` or `3 to 5`; nothing where no value is known."""
    return span(table[column] if column in table else (), lambda value: f"{float(value):,.4g}")


def _rendered(name: str, facts: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("vitsweep.extras.paper"), undefined=StrictUndefined, trim_blocks=True,
        block_start_string="<%", block_end_string="%>", variable_start_string="<<",
        variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
        lstrip_blocks=True, autoescape=False, finalize=lambda value: "" if value is None else value,
    )  # fmt: skip
    environment.filters |= {"tex": tex, "count": lambda n, what: count(n, what), "number": _number}
    return environment.get_template(f"{name}.j2").render(facts)


def _number(value: float | None) -> str:
    return "" if value is None else number(value)
