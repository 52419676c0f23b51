import math

import pytest

from tests.builders import run, table
from tests.said import opening
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.cells import cells
from vitsweep.tables.formatting import markdown
from vitsweep.tables.render import cell_text, ranked

BASELINES = {"base": "base", "fast": "base", "dead": "base"}


@pytest.fixture
def four():
    runs = table(
        *[run("base", f"b{i}", 100 + i) for i in range(3)],
        *[
            run("fast", f"b{i}", 200 + 2 * i, precision="O2", metrics={"accuracy_top1": 0.9512})
            for i in range(3)
        ],
        run("dead", "b0", status=Status.out_of_memory, reason="rank 1:\n no room", sharding="fsdp"),
    )
    return cells(runs, BASELINES)


def test_the_table_shows_what_varies_and_what_came_out(four):
    text = cell_text(four)
    assert list(text) == [
        "cell", "img/s", "speedup", "result", "status", "step ms", "top-1", "blocks"
    ]  # fmt: skip
    assert text.iloc[0].tolist() == [
        "O2", "202", "2.00x [2.00, 2.00]", "faster", "measured", "317", "95.1 %", "3"
    ]  # fmt: skip
    name, *empty, status = text.iloc[2].tolist()[:5]
    assert (name, empty, text.iloc[2].tolist()[5:]) == ("fsdp", [""] * 3, ["", "", "0"])
    assert status.split(": ") == ["out of memory", "rank 1", "no room"]


def test_fastest_first_and_failures_last(four):
    assert ranked(four)["cell_id"].tolist() == ["fast", "base", "dead"]


def test_the_peak_is_of_the_gpu_where_there_is_one():
    runs = table(run("base", metrics={"peak_rss_gib": 9.0, "peak_allocated_gib": 4.25}))
    assert cell_text(cells(runs, {}))["peak GiB"].tolist() == ["4.25"]


def test_flags_are_reported_next_to_the_status():
    runs = table(run("base", validity={"oversubscribed": True}))
    assert cell_text(cells(runs, {}))["status"].tolist() == ["measured: oversubscribed"]


def test_a_measured_cell_without_speedup_says_why():
    runs = table(
        run("base", status=Status.out_of_memory, reason="no room"), run("fast", precision="O2")
    )
    notes = cell_text(cells(runs, BASELINES)).set_index("cell")["note"]
    assert notes["O2"].startswith(opening("no_speedup"))
    assert "out of memory" in notes["O2"]


def test_images_per_second_are_paired():
    slow_day = [run("base", f"b{i}", 50, minute=i) for i in range(3)]
    slow_day += [run("fast", f"b{i}", 100, minute=i, precision="O2") for i in range(3)]
    fast_day = [run("base", f"b{i}", 100, minute=i) for i in range(3, 9)]
    far = cells(table(*slow_day, *fast_day), BASELINES)
    assert far.set_index("cell_id").loc["fast", "images_per_second"] == pytest.approx(200)


def test_markdown_escapes_pipes():
    runs = table(run("base", status=Status.failed, reason="a|b"))
    lines = markdown(cell_text(cells(runs, {}))).splitlines()
    assert lines[1].startswith("| --- |")
    assert "a\\|b" in lines[2]


NUMBERS = [(0.01234, "0.0123"), (1.234, "1.23"), (1234.5, "1,234"), (99.96, "100"), (0, "0")]
NOTHING = [(math.nan, ""), (math.inf, ""), (None, "")]


def test_numbers_have_three_digits():
    for value, text in [*NUMBERS, *NOTHING, (-2.5, "-2.50")]:
        assert formatting.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e300, "1.00e+300"),
        (-2.5e15, "-2.50e+15"),
        (1e-300, "1.00e-300"),
        (5e11, "500,000,000,000"),
    ],
)
def test_a_number_that_would_fill_lines_has_an_exponent(value, text):
    assert formatting.number(value) == text
    assert len(formatting.plain(value)) < 20
    cells = table(run("base", metrics={"activation_gib": value}))
    assert len(formatting.as_text(cells[["activation_gib"]]).iloc[0, 0]) < 20


def test_a_text_is_cut_between_words_and_within_a_long_one():
    for text, cut in (
        ("no room", "no room"),
        ("memory of rank 1 ends", "memory of rank…"),
        ("f raised " + "x" * 99, "f raised " + "x" * 50 + "…"),
        ("x" * 99, "x" * 59 + "…"),
    ):
        assert formatting.cut_at_word(text, 17 if "memory" in text else 60) == cut


def test_a_bare_value_in_a_label_is_named():
    row = table(run("base", nodes=4)).iloc[0]
    label = formatting.cell_label(
        row, ["precision", "nodes", "seed", "resolution_px", "sequence_parallel"]
    )
    assert label == "fp32 · 4 nodes · seed=0 · 8 px · sequence_parallel=none"
