"""What `vitsweep report --latex` writes: LaTeX of what was measured, and nothing that was not."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.builders import run as of_blocks
from tests.extras.laboratory import laboratory
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.latex.latex import booktabs, method, tex, write_latex
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables


@pytest.mark.smoke
def test_table_and_method_say_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"device": "CPU_1 & 100 %"}
    store = laboratory(tmp_path / "first", "optimizer=adamw_foreach", environment=environment)
    for path in (store.root / "cells" / store.cell_ids()[0] / "runs").glob("*.json"):
        record = RunRecord.from_json(path.read_text())
        moved = record.environment | {"git_commit": "fedcba9876543210"}
        path.write_text(replace(record, environment=moved).to_json())
    assert run(["report", str(store.root), "--latex"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [p.name for p in written] == ["results.tex", "method.tex"]
    table, method = (p.read_text(encoding="utf-8") for p in written)
    for text in (table, method):
        opened, closed = (
            Counter(re.findall(rf"\\{w}{{([\w*]+)}}", text)) for w in ("begin", "end")
        )
        assert opened == closed
        plain = re.sub(r"\\[{}]", "", text)
        assert plain.count("{") == plain.count("}")
        assert not re.search(r"None|\bnan\b", text)
    assert r"\toprule" in table
    assert r"$\times$ [1." in table
    for words in (
        r"CPU\_1 \& 100 \%",
        "2 cells, all measured",
        "geometric means over 5 blocks (1 configuration) of the ratios within a block",
        "with 95 \\% intervals (Student's t)",
        "of one baseline: faster (1).",
        "2 of 2 configurations was compared with reference training",
        "is fastest: 1.4",
    ):
        assert words in method, method
    assert re.search(r"commit (0123abcd, fedcba98|fedcba98\w*, 0123abcd)", method), method


def test_a_cell_that_is_compared_with_nothing_has_no_claim_to_count(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").create()
    for cell, speed in (("base", 100.0), ("fast", 150.0), ("alone", 90.0)):
        for n in range(3):
            store.save_run(of_blocks(cell, f"b{n}", speed + n / 10, minute=n, precision=cell))
    store.append_command(
        {"baselines": {"base": "base", "fast": "base", "alone": None}, "command": "typed"}
    )
    assert "of one baseline: faster (1)." in method(SweepTables.of(store.root))


def test_text_of_a_sweep_is_no_command_of_latex() -> None:
    said = tex(r"\input{/etc/passwd} 50% a_b #1 $x$ ~ ^ 1.5x")
    assert said == (
        r"\textbackslash{}input\{/etc/passwd\} 50\% a\_b \#1 \$x\$ \textasciitilde{} "
        r"\textasciicircum{} 1.5$\times$"
    )
    assert tex("Müller, e\u0301, 中 \x1b") == r"Müller, é, \texttt{U+4E2D} \texttt{U+001B}"
    rows = pd.DataFrame(
        {"cell": [r"\end{tabular}", "O1", "O2"], "speedup": ["1.2x", "1.1x", "1.0x"]}
    )
    table = booktabs(rows, pd.Series(["1 rank", "2 ranks", "1 rank"]))
    assert table.count(r"\end{tabular}") == 1
    assert r"\begin{tabular}{lr}" in table
    places = [table.index(text) for text in (r"\emph{1 rank}", "O2 &", r"\emph{2 ranks}", "O1 &")]
    assert places == sorted(places)


def test_nothing_is_written_of_a_sweep_without_a_measured_cell(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="no measured cell"):
        write_latex(Store(tmp_path).create().root)
    assert not (tmp_path / "report").exists()


def test_a_speedup_over_seeds_is_reported_to_be_over_seeds_and_proved_where_all_are(
    tmp_path: Path,
) -> None:
    records = [
        of_blocks(f"{p}-{s}", f"s{s}b{b}", ratio * (100 + b / 100), minute=9 * s + b, precision=p, seed=s)
        for p, ratio in (("base", 1), ("O1", 1.6)) for s in range(1, 4) for b in range(3)
    ]  # fmt: skip
    store = Store(tmp_path / "s").create()
    for record in records:
        record.validity["proved"] = "" if record.cell_id == "O1-2" else "twin 1.0e-07"
        store.save_run(record)
    cells = sorted({r.cell_id for r in records})
    baselines = {cell: f"base-{cell[-1]}" for cell in cells}
    store.append_command(
        {"baselines": baselines, "cells": cells, "command": "typed", "replicate": "seed"}
    )
    said = method(SweepTables.of(store.root))
    assert "3 seeds (1 configuration)" in said
    assert say("method_proved", proved=1, all="2 configurations") in said
