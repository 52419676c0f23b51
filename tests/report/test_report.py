import json
import re
import shutil
import subprocess
from cProfile import Profile
from dataclasses import replace
from html import unescape
from pathlib import Path
from pstats import Stats
from typing import Any

import pandas as pd
import pytest

from tests.builders import from_runs, run
from tests.said import opening
from tests.sample_sweep import records_of, write
from vitsweep import extras
from vitsweep.errors import VitsweepError
from vitsweep.report import html
from vitsweep.report.answer import answers
from vitsweep.report.html import render, write_report
from vitsweep.report.views import collect
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import NO_PAIR
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

BASELINES = {"base": "base", "fast": "base", "dead": "base", "bad": None}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a small sweep with a failed and a refused cell."""
    store = Store(tmp_path_factory.mktemp("report") / "sample").create()
    phases = {"forward_ms": 1.0, "backward_ms": 2.0}
    for i in range(3):
        store.save_run(run("base", f"b{i}", 100 + i, metrics=phases))
        store.save_run(run("fast", f"b{i}", 200 + 3 * i, precision="O2", metrics=phases))
    store.save_run(
        run("dead", "b0", status=Status.out_of_memory, reason="asked <b>much</b>", sharding="fsdp")
    )
    refused = {"status": "invalid", "reason": "`precision=fp8` needs a GPU.", "precision": "fp8"}
    (store.cell("bad")).mkdir()
    (store.cell("bad") / "record.json").write_text(json.dumps(refused))
    store.append_command({"baselines": BASELINES, "command": "python -m vitsweep -m precision=O2"})
    return write_report(store.root)


def test_reasons_are_clamped_at_every_width_and_long_names_wrap(page):
    everywhere = page.read_text().partition("@media (max-width")[0]
    assert "td.reason > div { display: -webkit-box; -webkit-box-orient: vertical;" in everywhere
    assert "#cells td:first-child > div { white-space: normal;" in everywhere


def test_the_report_is_one_page_with_everything_next_to_it(page):
    assert page.parts[-3:] == ("sample", "report", "index.html")
    beside = {path.name for path in page.parent.iterdir()}
    assert beside == {
        "index.html", "cells.csv", "table.md",
        "speedup.png", "speedup.svg", "phases.png", "phases.svg",
    }  # fmt: skip
    assert pd.read_csv(page.parent / "cells.csv")["images_per_second"].dtype == float


def test_a_section_that_fails_does_not_stop_the_report(page, monkeypatch):
    failing = extras.Feature(section="missing:section", heading="Failing")
    monkeypatch.setitem(html.FEATURES, "failing", failing)
    with pytest.warns(html.ChartWarning, match="`failing`"):
        text = write_report(page.parents[1]).read_text()
    assert "No section: ModuleNotFoundError: " in text
    assert "precision, sharding trains vit_nano" in text


def test_the_page_needs_no_network(page):
    text = page.read_text()
    fetched = re.findall(r"""(?:src|href)=["'](?!#)([^"']+)|url\((?!#)([^)]+)\)|@import""", text)
    assert {a or b for a, b in fetched} == {
        "cells.csv", "table.md",
        "speedup.png", "speedup.svg", "phases.png", "phases.svg",
    }  # fmt: skip


def test_the_page_answers_covers_and_can_be_repeated(page):
    text = page.read_text()
    assert "precision, sharding trains vit_nano" in text
    assert "O2 is fastest: 2.0" in text
    assert "asked &lt;b&gt;much&lt;/b&gt;" in text
    assert "`precision=fp8` needs a GPU." in text
    assert "python -m vitsweep -m precision=O2" in text
    assert "1 invalid, 1 out of memory" in text


def test_a_feature_of_every_sweep_has_its_section_in_every_report(tmp_path, monkeypatch):
    """A row of the registry and a folder are all that it takes."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").write_text("")
    (tmp_path / "made" / "table.py").write_text(
        "from markupsafe import Markup\n"
        "def section(tables): return Markup(f'<p>{len(tables.cells)} of them</p>')\n"
    )
    monkeypatch.setattr(extras, "__path__", [*extras.__path__, str(tmp_path)])
    feature = extras.Feature(section="table:section", heading="What it costs")
    monkeypatch.setitem(extras.FEATURES, "made", feature)
    store = Store(tmp_path / "sweep").create()
    store.save_run(run("base", "b0"))
    page = write_report(store.root).read_text()
    assert '<h2 id="what-it-costs">What it costs</h2>\n<p>1 of them</p>' in page


def test_the_first_screen_has_the_answer_the_first_rows_and_one_chart(page):
    first = page.read_text().partition('<div class="first">')[2].partition('id="table"')[0]
    assert first.count("<tr>") == 1 + 4, "the head, and the cells"
    assert first.count("<figure") == 1
    assert "<svg" in first
    assert page.read_text().count('id="speedup"') == 1


def test_a_note_of_a_first_row_stands_numbered_below_the_table(tmp_path):
    """The table of all cells is below, out of sight."""
    store = Store(tmp_path / "s").create()
    for block in range(5):
        store.save_run(run("base", f"b{block}", 100 + block))
        for cell in ("large", "wide"):
            own = {"precision": cell, "resolution_px": 64}
            store.save_run(run(cell, f"b{block}", 150 + block, **own))
        store.save_run(run("fast", f"b{block}", 120 + block, precision="O2"))
    store.append_command({"baselines": dict.fromkeys(("base", "large", "wide", "fast"), "base")})
    first = write_report(store).read_text().partition('id="best"')[2].partition('id="table"')[0]
    rows = [re.sub("<.*?>", " ", row) for row in FIRST.findall(first)]
    assert sum("[1]" in row for row in rows) == 2, "of large and wide, which have one note"
    [note] = re.findall(r"<p class=.tally.>(\[\d\] .*?)</p>", first)
    assert note.startswith("[1] unequal work")
    assert "note" not in first.partition("</thead>")[0]


def test_of_several_settings_the_first_rows_are_the_fastest_of_each(tmp_path):
    store = Store(tmp_path / "s").create()
    baselines = {}
    for number in range(10):
        base, cell = f"base{number}", f"cell{number}"
        baselines |= {base: base, cell: base}
        for block in range(5):
            common = {"resolution_px": 32 * (number + 1)}
            speed = (100 + block) * (1.3 if number < 4 else 1.0)
            store.save_run(run(base, f"b{block}", 100 + block, **common))
            store.save_run(run(cell, f"b{block}", speed, precision="O2", **common))
    store.append_command({"baselines": baselines})
    text = write_report(store).read_text()
    assert say("settings_shown", shown=4, all=10) in text
    first = text.partition('id="best"')[2].partition("</table>")[0]
    assert first.count("<tr>") == 1 + 8
    assert "none (highest: O2)" in first
    assert "32 px" in first
    assert "2 more settings" in text
    assert answers(SweepTables.of(store))[0] == say("settings_shown", shown=4, all=10)


FIRST = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)


def first_rows(folder: Path, *runs: RunRecord, base: str = "base", **command: Any) -> list[str]:
    """Write a report of runs whose cells are named `SETTING.CELL`; return the rows of its first table."""
    store = Store(folder).create()
    for record in runs:
        store.save_run(record)
    ids = dict.fromkeys(r.cell_id for r in runs)
    baselines = {cell: f"{cell.partition('.')[0]}.{base}" for cell in ids}
    store.append_command({"baselines": baselines, "cells": list(ids)} | command)
    text = write_report(store).read_text()
    table = text.partition('id="best"')[2].partition("</table>")[0]
    rows = [
        " | ".join(re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)) for row in FIRST.findall(table)
    ]
    return [unescape(e) for e in (*re.findall(r'<p class="answer">(.*?)</p>', text)[:1], *rows)]


def setting(name: str, ratios: dict[str, Any], **facts: Any) -> list[RunRecord]:
    """Runs of a setting, in five blocks, of cells with these ratios to its baseline `base`."""
    return [
        run(f"{name}.{cell}", f"{name}{n}", r and (100 + n % 2) * r, minute=n,
            precision="fp32" if cell == "base" else cell, model=name, **facts)
        for cell, some in {"base": [1.0] * 5, **ratios}.items()
        for n, r in enumerate(some)
    ]  # fmt: skip


SURE, ALIKE = (1.301, 1.299, 1.302, 1.298, 1.3), (1.3, 1.302, 1.298, 1.3, 1.301)
UNSURE = [(0.95, 1.05, 1.0, 0.97, 1.03)] * 8


def test_a_row_of_the_first_screen_says_what_the_sentence_says(tmp_path):
    noisy = (1.0, 2.6, 1.1, 2.5, 1.4)
    accuracy = {"base": 0.97, "O1": 0.3}
    lost = [
        replace(r, metrics=r.metrics | {"accuracy_top1": accuracy[r.cell_id[2:]]})
        for r in setting("d", {"O1": SURE})
    ]
    failed = [
        replace(r, status=Status.failed, metrics={}) if r.cell_id == "e.base" else r
        for r in setting("e", {"O1": SURE})
    ]
    likely = {"O1": (1.02, 1.1, 1.06, 1.03, 1.12)} | {f"o{n}": r for n, r in enumerate(UNSURE)}
    said, head, *rows = first_rows(
        tmp_path / "s",
        *setting("a", {"O1": SURE, "O2": ALIKE}),
        *setting("b", {"O1": SURE, "O2": noisy}),
        *setting("c", likely),
        *lost,
        *failed,
        *setting("f", {"O2": noisy}),
    )
    assert said == say("settings_shown", shown=2, all=6), "not: unshown, failed, less accurate"
    assert head.split(" | ")[2:] == ["speedup", "result"]
    rows = {row.partition(" | ")[0][0]: row.partition(" | ")[2] for row in rows}
    assert re.match(r"O[12] \(.*: O[12]\) \| 1\.30x \[1\.30, 1\.30\] \| faster$", rows["a"])
    assert rows["b"].startswith("O1 | 1.30x [1.30, 1.30] | faster")
    assert re.match(r"none \(highest: O1\) \| 1.07x \[1\.0\d, 1.1\d\] \| no diff", rows["c"])
    assert re.match(r"none \(less accurate: O1\) \| .* \| faster, .*30.0 %", rows["d"])
    assert f" |  | {opening('no_speedup')}" in rows["e"]
    assert f"{Claim.no_difference_shown}, {opening('noisy')}" in rows["f"]


def test_without_a_ratio_the_first_rows_are_cells(tmp_path):
    runs = [r for name in "ab" for r in setting(name, {"O1": SURE}) if r.cell_id[2:] != "base"]
    said, head, *rows = first_rows(tmp_path / "s", *runs)
    assert opening("no_baseline", names="O1").partition("O1")[2] in said
    assert head.startswith("cell | img/s")
    assert len(rows) == 2


def test_settings_of_two_devices_are_distinguished(tmp_path):
    said, _, *rows = first_rows(
        tmp_path / "s",
        *setting("a", {"O1": SURE}, environment={"device": "V100"}),
        *(
            replace(r, block=f"x{r.block}", run_id=f"x{r.run_id}", status=status, reason="no room")
            for r in setting("a", {"O1": SURE}, environment={"device": "A100"})
            for status in (Status.failed if r.cell_id == "a.base" else Status.measured,)
        ),
    )
    assert said == say("settings_shown", shown=1, all=2)
    assert [row.partition(" | ")[0] for row in rows] == ["V100", "A100"]
    assert rows[1].rpartition(" | ")[2].startswith(opening("no_speedup"))
    told = " ".join(answers(SweepTables.of(Store(tmp_path / "s"))))
    assert "img/s against" not in told
    assert "130 against 100 img/s" in told


def test_charts_follow_the_theme_of_the_page(page):
    text = page.read_text()
    assert "var(--grid)" in text
    assert "#d8dade" not in text[text.index("<svg") : text.index("</svg>")]


def test_a_folder_without_records_is_named(tmp_path):
    with pytest.raises(VitsweepError, match=r"empty`"):
        write_report(Store(tmp_path / "empty").create())


def test_nothing_measured_is_an_answer(tmp_path):
    store = Store(tmp_path / "s").create()
    store.save_run(run("dead", status=Status.out_of_memory, reason="no room"))
    assert answers(SweepTables.of(store)) == [say("nothing_measured", why="1 out of memory")]
    assert opening("nothing_measured") in write_report(store).read_text()


def said(tmp_path, *speeds):
    store = Store(tmp_path / "s").create()
    for i, speed in enumerate(speeds):
        store.save_run(run("base", f"b{i}", 100))
        store.save_run(run("fast", f"b{i}", speed, precision="O2"))
    store.append_command({"baselines": BASELINES})
    return answers(SweepTables.of(store))[0]


def test_noise_is_not_called_faster(tmp_path):
    assert opening("none_shown", base="the baseline") in said(tmp_path, 99, 103, 101)


def test_slower_is_not_called_fastest(tmp_path):
    assert said(tmp_path, 50, 51, 52).endswith(" img/s: slower.")


def test_two_blocks_claim_nothing(tmp_path):
    assert f"{Claim.too_few_blocks}." in said(tmp_path, 200, 201)


def test_the_page_tells_exposed_from_overlapped_communication(tmp_path):
    store = Store(tmp_path / "s").create()
    for ranks, step_ms in ((1, 100.0), (2, 65.0)):
        for i in range(3):
            speed = 1000 * 64 / step_ms
            size = {"world_size": ranks, "ranks_per_node": ranks}
            metrics = {"communication_ms": 30.0 * (ranks - 1)}
            store.save_run(run(f"r{ranks}", f"b{i}", speed, minute=i, metrics=metrics, **size))
    store.append_command({"baselines": {"r1": None, "r2": None}})
    page = write_report(store)
    text = page.read_text()
    [row] = re.findall(r"<tr>(<td>[^\n]*15\.0 \[15\.0, 15\.0\].*?)</tr>", text)
    # 65 ms for half of the images that take 100: 15 ms are exposed, 15 of 30 ms of collectives hidden
    assert re.findall(r">([^<]+)</td>", row)[1:9] == [
        "2", "65.0", "50.0", "15.0 [15.0, 15.0]", "15.0", "30.0", "0", "23.1 %",
    ]  # fmt: skip
    assert pd.read_csv(page.parent / "exposed_communication.csv")[
        "overlapped_ms"
    ].max() == pytest.approx(15)


def test_cells_that_lost_all_their_pairs_are_named_with_the_reason(tmp_path):
    store = Store(tmp_path / "s").create()
    for i in range(3):
        store.save_run(run("base", f"b{i}", 100))
        store.save_run(run("fast", f"c{i}", 200, precision="O2"))
    store.append_command({"baselines": {"base": "base", "fast": "base"}})
    assert answers(SweepTables.of(store)) == [
        say("no_baseline", names="O2", rate=200),
        say("not_compared", name="O2", rate=200, note=say("no_speedup", why=NO_PAIR)),
    ]
    for i in range(3):
        size = {"world_size": 4, "ranks_per_node": 4}
        store.save_run(run("base4", f"b{i}", 100, **size))
        store.save_run(run("fast4", f"b{i}", 200 + i, precision="O2", **size))
    store.append_command({"baselines": {"base4": "base4", "fast4": "base4"}})
    found = answers(SweepTables.of(store))
    assert len(found) == 4, "two answers, and a sentence for each of two scaling curves"
    assert "is fastest: 2.01x" in found[0], "what is shown comes first"
    assert found[1].endswith(f"{say('no_speedup', why=NO_PAIR)}.")


def test_without_a_baseline_the_fastest_is_named(tmp_path):
    store = Store(tmp_path / "s").create()
    store.save_run(run("a", "b0", 100))
    store.save_run(run("b", "b0", 150, precision="O2"))
    store.append_command({"cells": ["a", "b"], "baselines": {"a": None, "b": None}})
    assert answers(SweepTables.of(store)) == [say("no_baseline", names="O2", rate=150)]


COUNTED = """<script>
let reads = 0;
const own = Object.getOwnPropertyDescriptor(HTMLElement.prototype, "dataset");
Object.defineProperty(HTMLElement.prototype, "dataset", {get() { reads++; return own.get.call(this); }});
const seen = new MutationObserver(() => {});
seen.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
document.querySelectorAll("#cells th button")[2].click();
const search = document.getElementById("search");
search.value = "O2"; search.dispatchEvent(new Event("input"));
const shown = [...document.querySelectorAll("#cells tbody tr")].filter((row) => !row.hidden).length;
document.title = `${seen.takeRecords().length} changes, ${reads} reads, ${shown} rows`;
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs `apt-get install chromium`")
def test_a_thousand_rows_sort_and_filter_in_few_changes_of_the_page(tmp_path):
    cells = pd.DataFrame([run("base", precision=p).row() for p in ("fp32", "O2")] * 500)
    names = {"cell_id": [f"c{i}" for i in range(1000)]}
    table = cells.assign(
        **names, claim="slower", speedup=0.7, speedup_low=0.6, speedup_high=0.8, blocks=5
    )
    page = tmp_path / "page.html"
    table = table.assign(num_pairs=5, baseline_cell_id="c0", speedup_note="")
    found = from_runs(pd.DataFrame(), {}, table)
    page.write_text(render("big", found, []).replace("</body>", COUNTED))
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    done = subprocess.run(
        [*browser, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=500
    )
    told = re.search(r"<title>(\d+) changes, (\d+) reads, (\d+) rows</title>", done.stdout).groups()
    changes, reads, rows = map(int, told)
    assert rows == 500
    assert 1000 < changes < 2000, "each row is moved once, and hidden at most once"
    assert 0 < reads < 4 * 1000 * 10, "two for each comparison"


def test_each_table_is_computed_once_for_views_and_report(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "saved", lambda folder, name, figure: "")  # to draw takes longest
    store = write(tmp_path / "scaling", records_of("scaling"))
    tables, seen = SweepTables.of(store), Profile(builtins=False)
    seen.runcall(lambda: write_report(collect(tables)))
    calls = {(Path(file).stem, name): n for (file, _, name), (n, *_) in Stats(seen).stats.items()}
    once = [("cells", "cells"), ("scaling", "scaling_efficiency"), ("effects", "waterfall")]
    once += [("effects", "effects"), ("scaling", "exposed_communication"), ("load", "runs_of")]
    assert {key: calls.get(key) for key in once} == dict.fromkeys(once, 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs `apt-get install chromium`")
def test_long_names_do_not_widen_the_page_on_a_telephone(tmp_path):
    name = "a_name_without_a_blank_" * 6
    runs = [
        replace(r, spec=r.spec | {"model": name + r.spec["model"], "data": name})
        for s in "ab"
        for r in setting(s, {"O1": SURE})
    ]
    first_rows(tmp_path / "s", *runs)
    page = (tmp_path / "s" / "report" / "index.html").read_text()
    width = "<script>document.title = document.documentElement.scrollWidth + ' px';</script></body>"
    inner = json.dumps(page.replace("</body>", width)).replace("</", "<\\/")
    shown = "f.onload = () => { document.title = f.contentDocument.title }; f.srcdoc = "
    outer = f'<iframe id="f" width="390" height="900"></iframe><script>{shown}{inner}</script>'
    (tmp_path / "page.html").write_text(outer)
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=4000",
    ]
    typed = [
        *browser,
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=500)
    assert int(re.search(r"<title>(\d+) px</title>", done.stdout).group(1)) <= 390
