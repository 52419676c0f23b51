"""What `vitsweep paper` writes: LaTeX of what was measured, and nothing that was not."""

import inspect
import re
import subprocess
import textwrap
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import which

import pandas as pd
import pytest
import yaml

from tests.cells import cell
from tests.extras.bundle.laboratory import laboratory
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.paper import paper as paper_module
from vitsweep.extras.paper.paper import (
    bibliography,
    booktabs,
    tex,
    used,
    without_letters,
    write_paper,
)
from vitsweep.report import figures
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.technique import Technique
from vitsweep.tables.sweep_tables import SweepTables

BIB = Path(paper_module.__file__).with_name("references.bib").read_text(encoding="utf-8")
KEYS = re.findall(r"^@\w+\{([^,]+),", BIB, re.MULTILINE)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the command writes for a sweep of two cells, with the chart of speedups."""
    folder = tmp_path_factory.mktemp("paper")
    environment = {"run_seconds": 36.0, "device": "CPU_1 & 100 %"}
    store = laboratory(folder / "first_sweep", "optimizer=adamw_foreach", environment=environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "CHARTS", [c for c in figures.CHARTS if c.name == "speedup"])
        assert run(["paper", str(store.root), "--price", "2.5"], {}) == 0
    return store.root / "paper"


def test_the_documents_are_whole_and_say_what_was_done(paper: Path) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in paper.glob("*.tex")}
    assert set(texts) == {
        "paper.tex", "methods.tex", "results.tex", "compute.tex", "checklist.tex"
    }  # fmt: skip
    for text in texts.values():
        opened, closed = (
            Counter(re.findall(rf"\\{w}{{([\w*]+)}}", text)) for w in ("begin", "end")
        )
        assert opened == closed
        plain = re.sub(r"\\[{}]", "", text)
        assert plain.count("{") == plain.count("}")
        assert not re.search(r"<<|<%|None|\bnan\b", text)
    methods = " ".join(texts["methods.tex"].split())
    assert "measured 2 configurations of 2" in methods
    assert "Speedups are means over 5 blocks (1 configuration)." in methods
    assert "faster (1)" in methods
    assert "on 1 rank of" in methods
    assert r"CPU\_1 \& 100 \%" in methods
    assert r"\toprule" in texts["results.tex"]
    assert r"$\times$ [1." in texts["results.tex"]
    assert "Yes: 1 speedup with 95" in texts["checklist.tex"]
    assert "all 2 configurations. 2 were measured (1 faster)." in texts["checklist.tex"]


def test_every_commit_that_was_measured_is_named(tmp_path: Path) -> None:
    store = laboratory(tmp_path / "moved", "optimizer=adamw_foreach", environment={})
    cell_id = store.cell_ids()[0]
    for path in (store.root / "cells" / cell_id / "runs").glob("*.json"):
        record = RunRecord.from_json(path.read_text())
        facts = record.environment | {"git_commit": "fedcba9876543210"}
        path.write_text(replace(record, environment=facts).to_json())
    write_paper(SweepTables.of(store), tmp_path / "paper", [])
    for name in ("methods.tex", "checklist.tex"):
        text = (tmp_path / "paper" / name).read_text()
        assert re.search(
            r"commits \\texttt\{(0123abcd, fedcba987654|fedcba987654, 0123abcd)\}", text
        ), text


def test_figures_are_as_wide_as_a_column_and_their_text_is_text(paper: Path) -> None:
    for name, inches in (("speedup", 3.25), ("speedup_wide", 6.75)):
        svg = (paper / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert f'width="{72 * inches:g}pt"' in svg
        assert ">Speedup over the baseline (x)" in svg  # a line of the label
        pdf = (paper / "figures" / f"{name}.pdf").read_bytes()
        assert b"/CIDFontType2" in pdf
        assert b"/Type3" not in pdf


def test_what_is_cited_is_in_the_bibliography(paper: Path) -> None:
    cited = {
        key
        for words in re.findall(r"\\cite\{([^}]+)\}", (paper / "methods.tex").read_text())
        for key in words.split(",")
    }
    entries = set(
        re.findall(r"^@\w+\{([^,]+),", (paper / "references.bib").read_text(), re.MULTILINE)
    )
    assert cited == entries
    assert {"loshchilov2017adamw", "dosovitskiy2020vit", "li2020ddp", "holm1979"} <= entries
    assert "chen2023lion" not in entries
    with pytest.raises(VitsweepError, match="no entry nobody1900"):
        bibliography(["nobody1900"])


def test_compute_that_is_unknown_is_empty_and_never_zero(paper: Path) -> None:
    compute = (paper / "compute.tex").read_text()
    assert re.search(r"^runs & 10 ", compute, re.MULTILINE)
    assert re.search(r"^rank hours, any device & 0\.100 ", compute, re.MULTILINE)
    for unknown in ("GPU hours", r"cost \(USD\)", r"energy .*"):
        assert re.search(rf"^{unknown} &  \\\\$", compute, re.MULTILINE)


def test_compute_is_added_up_over_ranks_of_gpus() -> None:
    runs = pd.DataFrame(
        {
            "status": ["measured", "measured", "failed", "measured"],
            "run_seconds": [1800.0, 3600.0, None, 7200.0],
            "world_size": [2, 2, 2, 1],
            "device_type": ["cuda", "cuda", "cuda", "cpu"],
            "window_energy_j": [3.6e6, 1.8e6, None, None],
        }
    )
    found = used(runs, 2.0)
    assert (found.runs, found.timed_runs, found.gpu_hours, found.rank_hours) == (4, 3, 3.0, 5.0)
    assert (found.cost, found.energy_kwh) == (6.0, 1.5)
    assert used(runs).cost is None
    on_cpu = used(runs[3:], 2.0)
    assert (on_cpu.gpu_hours, on_cpu.cost, on_cpu.energy_kwh) == (None, None, None)


def test_text_of_a_sweep_is_no_command_of_latex() -> None:
    said = tex(r"\input{/etc/passwd} 50% a_b #1 $x$ ~ ^ 1.5x")
    assert said == (
        r"\textbackslash{}input\{/etc/passwd\} 50\% a\_b \#1 \$x\$ \textasciitilde{} "
        r"\textasciicircum{} 1.5$\times$"
    )
    rows = pd.DataFrame(
        {"cell": [r"\end{tabular}", "O1", "O2"], "speedup": ["1.2x", "1.1x", "1.0x"]}
    )
    table = booktabs(rows, pd.Series(["1 rank", "2 ranks", "1 rank"]))
    assert table.count(r"\end{tabular}") == 1
    assert r"\begin{tabular}{lr}" in table
    places = [table.index(text) for text in (r"\emph{1 rank}", "O2 &", r"\emph{2 ranks}", "O1 &")]
    assert places == sorted(places)


EVERY_LATIN = "".join(c for c in map(chr, range(0x20, 0x2200)) if "texttt" not in tex(c))


def test_letters_stay_and_what_latex_does_not_know_is_named() -> None:
    assert tex("Müller, Čapek, e\u0301, 10 µs") == "Müller, Čapek, é, 10 µs"
    said = [tex("中 \x1b"), tex("é")]
    assert said == [r"\texttt{U+4E2D} \texttt{U+001B}", "é"]
    assert without_letters(said) == [
        "U+001B without a name", "U+4E2D CJK UNIFIED IDEOGRAPH-4E2D"
    ]  # fmt: skip
    assert {"Å", "ż", "ę", "ß", "ø", "“", "→"} <= set(EVERY_LATIN)


@pytest.mark.skipif(which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("encoding", ["OT1", "T1"])
def test_latex_shows_every_letter_that_stays(encoding: str, tmp_path: Path) -> None:
    shown = "\n\n".join(map(tex, textwrap.wrap(EVERY_LATIN + "中文", 40)))
    (tmp_path / "letters.tex").write_text(
        rf"\documentclass{{article}}\usepackage[{encoding}]{{fontenc}}\begin{{document}}"
        f"{shown}\n\\end{{document}}\n"
    )
    command = [
        "pdflatex",
        "-draftmode",
        "-halt-on-error",
        "-interaction=nonstopmode",
        "letters.tex",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in (tmp_path / "letters.log").read_text(errors="replace")


def test_nothing_is_written_of_a_sweep_without_a_measured_cell(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="no measured cell"):
        write_paper(SweepTables.of(Store(tmp_path).create()), tmp_path / "paper", [])
    assert not (tmp_path / "paper").exists()


def classes() -> dict[str, type]:
    """`_target_` -> class of every choice of a technique and of every model."""
    targets = {yaml.safe_load(p.read_text()).get("_target_") for p in conf_dir().rglob("*.yaml")
               if p.parent.name not in ("data", "launcher")}  # fmt: skip
    split = (target.rpartition(".") for target in targets - {None})
    found = {f"{m}.{n}": getattr(import_module(m), n) for m, _, n in split}
    return {name: cls for name, cls in found.items() if hasattr(cls, "cites")}


def test_every_class_that_names_a_paper_cites_it() -> None:
    eprints = dict(zip(re.findall(r"eprint = \{([\d.]+)\}", BIB), KEYS, strict=False))
    assert len(KEYS) == len(set(KEYS))
    by_key = dict(re.findall(r"@\w+\{([^,]+),.*?eprint = \{([\d.]+)\}", BIB, re.DOTALL))
    assert len(eprints) == len(by_key)
    known = classes()
    assert len(known) > 50
    assert {key for cls in known.values() for key in cls.cites} <= set(KEYS)
    own = {
        n: re.findall(r"arXiv:(\d{4}\.\d{5})", inspect.getdoc(c) or "") for n, c in known.items()
    }
    del own["vitsweep.techniques.sharding.fsdp.Fsdp"]  # of one of its knobs
    lacking = {n: ids for n, ids in own.items()
               if ids and not {by_key.get(key) for key in known[n].cites} & set(ids)}  # fmt: skip
    assert lacking == {}


def test_knobs_choose_among_the_papers_of_a_class() -> None:
    def of(group: str, *overrides: str) -> tuple[str, ...]:
        technique: Technique = getattr(cell(*overrides), group)
        return technique.references

    assert of("pipeline_parallel", "pipeline_parallel=gpipe", "mesh.pipeline=2") == (
        "huang2018gpipe",
    )
    assert of("attention", "attention=sdpa_math") == ()
    assert of("attention", "attention=sdpa_flash")[0] == "dao2022flashattention"
    assert "li2023fourbit" in of("optimizer", "optimizer=adamw_4bit")
    assert "li2023fourbit" not in of("optimizer", "optimizer=adamw_8bit")
