"""What the page of a report, its CSV and its samples hold, without drawing it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pandas import DataFrame, Series

from tests.builders import from_runs, run, table
from tests.report.test_answer import settings_of
from vitsweep.report import html
from vitsweep.report.answer import MOST
from vitsweep.report.views import MOST_COLUMNS, for_people, samples
from vitsweep.results.record import SCREENING, Status
from vitsweep.tables.cells import cells
from vitsweep.tables.speedup import OTHER_SIZE

NAN = float("nan")


def test_the_first_screen_has_eight_rows_and_counts_the_others() -> None:
    for number, more in ((MOST, ""), (MOST + 1, "1 more setting")):
        tables = settings_of(number)
        found = html._first_screen(tables)
        assert (len(found["best"]["data"]), found["more"]) == (min(number, MOST), more)
        assert "fastest shown" in found["best"]["columns"]
        assert found["answer"] not in found["answers"]
        assert len(found["answers"]) == min(number, MOST) - (number > MOST)
    alone = html._first_screen(settings_of(1))
    assert alone["best"]["columns"] == ["cell", "img/s", "speedup", "result"]
    assert (len(alone["best"]["data"]), alone["more"], alone["answers"]) == (2, "", [])
    runs = table(*[run(f"c{n}", precision=f"O{n}") for n in range(MOST + 2)])
    assert html._first_screen(from_runs(runs, {}))["more"] == "2 more cells"


def test_the_first_screen_has_the_footnotes_of_its_rows() -> None:
    runs = [
        run(c, "k", speed, precision=c, environment={"purpose": SCREENING}, data=data)
        for c, speed, data in (("fp32", 100, "digits"), ("O1", 93, "digits"), ("O2", 91, "other"))
    ]
    runs.append(run("O3", "k", 90.0, precision="O3", validity={"unmoved_weights": True}))
    found = html._first_screen(from_runs(table(*runs), {r.cell_id: "fp32" for r in runs}))
    rows = [dict(zip(found["best"]["columns"], row, strict=True)) for row in found["best"]["data"]]
    assert [row["result"] for row in rows] == [
        "baseline", "screened", "screened [1]", "screened [2]",
    ]  # fmt: skip
    assert rows[1]["speedup"] == "0.93x (no interval)"
    other, frozen = found["footnotes"]
    assert other.startswith(f"[1] {OTHER_SIZE}")
    assert frozen.startswith("[2] ")
    assert "unmoved_weights" in frozen


def test_the_table_of_the_page_sorts_by_numbers_and_filters_by_choices() -> None:
    runs = [
        run("a", "b0", 1234.5),
        run("b", "b0", 200.0, precision="O1"),
        run("c", status=Status.failed, precision="O2"),
    ]
    found = html.table(cells(table(*runs), {r.cell_id: "a" for r in runs}))
    assert found["filters"]["precision"] == ["O1", "O2", "fp32"]
    rows = [dict(zip(found["headings"], row, strict=True)) for row in found["rows"]]
    assert [row["cell"][0] for row in rows] == ["baseline", "O1", "O2"]
    assert rows[0]["img/s"] == ("1,234", "1234.5")
    assert rows[2]["img/s"] == ("", "")
    assert rows[0]["result"] == ("baseline", "baseline")
    assert found["classes"] == ["baseline", "too-few-blocks", "unmeasured"]
    for number, filtered in ((24, True), (25, False)):
        many = table(*[run(f"c{n}", **{"optimizer.momentum": n / 100}) for n in range(number)])
        assert ("optimizer.momentum" in html.table(cells(many, {}))["filters"]) == filtered


def test_the_environment_is_listed_by_values_or_as_a_range() -> None:
    for values, name, told in (
        (["a", "b", "a", None], "host", "a, b"),
        (["a", "b", "c"], "host", "a, b, c"),
        (["a", "b", "c", "d"], "host", "a, b, c … (4 values)"),
        ([3, 1, 2, 4], "cores", "1 to 4"),
        ([3, 1, "x", 4], "cores", "3, 1, x … (4 values)"),
        (["2026-03", "2026-01", "2026-02", "2026-04"], "started_at", "2026-01 to 2026-04"),
        ([None, NAN], "host", ""),
    ):  # fmt: skip
        assert html._values(Series(values, dtype=object), name) == told
    found = html.environment(cells(table(run("a"), run("b", environment={"host": "node-2"})), {}))
    assert dict(found)["host"] == "node-1, node-2"


def test_charts_of_features_come_behind_the_chart_that_they_name(monkeypatch: Any) -> None:
    names = [chart.name for chart in html.CHARTS]
    plain = SimpleNamespace(features=[])
    assert html.charts_of(plain) == list(html.CHARTS)
    own = replace(html.CHARTS[0], name="own")
    monkeypatch.setattr(
        html, "load", lambda path: replace(own, name=path.split(".")[-1].split(":")[0])
    )
    features = {
        "x": SimpleNamespace(charts={"one": names[2], "two": ""}),
        "y": SimpleNamespace(charts={"end": "no"}),
    }
    monkeypatch.setattr(html, "FEATURES", features)
    found = [chart.name for chart in html.charts_of(SimpleNamespace(features=["x", "y"]))]
    assert found == ["two", *names[:3], "one", *names[3:], "end"]


def test_a_csv_has_its_columns_in_order_and_the_flags_of_each_row() -> None:
    runs = table(
        run("a", validity={"oversubscribed": True, "throttled": True}),
        run("b", precision="O1", **{"optimizer.momentum": 0.5}),
        run("c", precision="O2", **{"optimizer.momentum": 0.9}),
    )
    found = for_people(cells(runs, {}))
    assert list(found)[:5] == ["cell_id", "cell", "status", "reason", "blocks"]
    assert list(found)[5:7] == ["precision", "optimizer.momentum"]
    assert found["flags"].tolist() == ["oversubscribed throttled", "", ""]
    assert len(found.columns) < MOST_COLUMNS
    assert "nodes" not in found
    assert for_people(DataFrame()).empty
    nodes = for_people(
        cells(table(run("a", nodes=1, world_size=2), run("b", nodes=2, world_size=4)), {})
    )
    assert nodes["nodes"].tolist() == [1, 2]


def test_samples_are_a_row_per_rank_and_step() -> None:
    steps = {"skipped": [False, True, False], "warm_up_steps": 1}
    two = replace(run("a"), samples=steps | {"step_time_ms": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]})
    found = samples([two, run("b"), replace(run("c"), samples={"skipped": []})])
    assert found["step_time_ms"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["step"].tolist() == [0, 1, 2] * 2
    assert found["warm_up"].tolist() == [True, False, False] * 2
    assert found["skipped"].tolist() == [False, True, False] * 2
    some = samples([replace(two, samples=two.samples | {"ranks": [3, 5]})])
    assert some["rank"].tolist() == [3, 3, 3, 5, 5, 5]
