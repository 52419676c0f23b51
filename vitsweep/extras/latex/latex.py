"""`vitsweep report SWEEP --latex`: the table of a sweep and a paragraph of method, as LaTeX."""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.errors import VitsweepError
from vitsweep.files import write_atomically
from vitsweep.report.answer import answers, measured_over
from vitsweep.results.metrics import headings
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, distinct
from vitsweep.tables.names import name_parts
from vitsweep.tables.render import cell_text
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

TABLE, METHOD = "results.tex", "method.tex"
_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "·": r"$\cdot$", "…": r"\ldots{}", "±": r"$\pm$",
}  # fmt: skip
_LATIN = re.compile("[\n -~\u00a1-\u00ff\u2013\u2018\u2019“”]")


def tex(text: object) -> str:
    """Return a text as pdfLaTeX shows it; a factor such as `1.27x` with its sign.

    Letters of ISO 8859-1 stay, in UTF-8; another character is written as its code point (`U+4E2D`).
    """
    composed = unicodedata.normalize("NFC", str(text))
    plain = "".join(_SPECIAL.get(c, c if _LATIN.match(c) else _code_point(c)) for c in composed)
    return re.sub(r"(?<=\d)x\b", r"$\\times$", plain)


def _code_point(character: str) -> str:
    return rf"\texttt{{U+{ord(character):04X}}}"


def write_latex(sweep: Path) -> list[Path]:
    """Write `report/results.tex`, for the package booktabs, and `report/method.tex`; return their paths.

    Args:
        sweep: its folder; files of an earlier call are replaced.

    Raises:
        VitsweepError: nothing was measured.
    """
    tables = SweepTables.of(sweep)
    cells = tables.settings
    if cells.empty or not (cells["status"] == Status.measured).any():
        raise VitsweepError(f"`{sweep}` has no measured cell: there is nothing to write as LaTeX.")
    text = cell_text(cells)
    parts = name_parts(cells).loc[text.index]  # settings of the baselines head their rows
    states = text["status"].astype(str).str.split(r"[:;(]", regex=True).str[0].str.strip()
    shown = text.assign(status=states, cell=parts["change"]).replace("", "--")
    written = {TABLE: booktabs(shown, parts["match"]), METHOD: tex(method(tables))}
    for name, content in written.items():
        write_atomically(sweep / "report" / name, f"{content.rstrip()}\n")
    return [sweep / "report" / name for name in written]


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
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}"])


def method(tables: SweepTables) -> str:
    """Return a paragraph of what was done, from the records, and the answer."""
    cells = tables.settings
    measured = cells[cells["status"] == Status.measured]
    said = [f"Measured with vitsweep: {style.caption(cells)}."]
    if commits := distinct(
        measured.assign(c=measured.get("git_commit", "")).replace("", None), "c"
    ):
        is_dirty = measured.get("git_dirty", Series(dtype=object)).eq(True).any()
        said.append(f"Code: commit {commits}{', with uncommitted changes' * bool(is_dirty)}.")
    compared = measured[measured["speedup_low"].notna()]
    if len(compared):
        numbers = Counter(map(measured_over, compared.sort_values("num_pairs").to_dict("records")))
        of_each = ", ".join(f"{n} ({count(c, 'configuration')})" for n, c in numbers.items())
        claims = Counter(map(str, measured["claim"]))
        verdicts = ", ".join(
            f"{c} ({claims[c]})" for c in Claim if c and claims[c] and c != Claim.baseline
        )
        any_look = compared["any_look"].eq(True).any() if "any_look" in compared else False
        rule = "any-look" if any_look else "Student's t"
        said.append(say("method", of_each=of_each, rule=rule, verdicts=verdicts))
        if "proved" in tables.cells:
            proved = sum(_is_proved(tables.cells, row) for row in measured.to_dict("records"))
            every = count(len(measured), "configuration")
            said.append(say("method_proved", proved=proved, all=every))
    return " ".join([*said, *answers(tables, with_estimate=False)])


def _is_proved(cells: DataFrame, row: Mapping[Hashable, Any]) -> bool:
    """Whether the twin of every measured cell of a row, which may stand for repetitions, was proved."""
    members = str(row.get("cell_ids", row["cell_id"])).split(",")
    own = cells[cells["cell_id"].isin(members) & (cells["status"] == Status.measured)]
    return bool(own["proved"].astype(str).str.startswith("twin").all())
