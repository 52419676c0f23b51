"""Values, columns and tables as text, at and beside each threshold."""

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.tables import formatting as text
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import about, timed_apart

NAN = float("nan")


def test_what_is_missing() -> None:
    for value in (None, NAN, pd.NA, "", np.float64("nan")):
        assert text.missing(value)
        assert (text.plain(value), text.number(value), text.percent(value)) == ("", "", "")
        assert (text.whole(value), text.ratio(value)) == ("", "")
        assert text.status_words(value) == text.status_words(None) != ""
    for value in (0, 0.0, False, " ", "nan", [], {}, [None], ()):
        assert not text.missing(value)


def test_numbers() -> None:
    for value, shown in (
        (3.0, "3"), (3.5, "3.5"), (True, "True"), (-2.0, "-2"), (1e12, "1000000000000.0"),
        (999_999_999_999.0, "999999999999"), ("a", "a"), (7, "7"), (float("inf"), "inf"),
    ):  # fmt: skip
        assert text.plain(value) == shown
    for value, digits, shown in (
        (0.0123, 3, "0.0123"), (1.23, 3, "1.23"), (1230, 3, "1,230"), (1234.5, 3, "1,234"), (12.34, 2, "12"),
        (0, 3, "0"), (1e12, 3, "1.00e+12"), (9.99e11, 3, "999,000,000,000"), (1e-6, 3, "0.00000100"),
        (9e-7, 3, "9.00e-07"), (-1.5, 2, "-1.5"), (float("inf"), 3, ""), (1.0, 1, "1"), (2e15, 1, "2e+15"),
        (99.96, 3, "100"), (9.996, 3, "10.0"), (0.0996, 2, "0.10"), (-99.96, 3, "-100"), (999.6, 3, "1,000"),
    ):  # fmt: skip
        assert text.number(value, digits) == shown
    assert (text.percent(0.1234), text.whole(1024.9), text.percent(0)) == (
        "12.3 %",
        "1,024",
        "0.0 %",
    )
    assert [text.count(n, "block") for n in (0, 1, 2, 1000)] == [
        "0 blocks", "1 block", "2 blocks", "1,000 blocks",
    ]  # fmt: skip
    assert [text.duration(s) for s in (9.4, 59.6, 127, 3599, 3900, 7200)] == [
        "9 s", "1 min 00 s", "2 min 07 s", "59 min 59 s", "1 h 05 min", "2 h 00 min",
    ]  # fmt: skip


def test_ratios_and_their_ends() -> None:
    for value, low, high, claim, shown in (
        (1.514, 1.481, 1.55, "", "1.51x [1.48, 1.55]"),
        (0.1, 0.05, 0.2, "", "0.10x [0.05, 0.20]"),
        (0.0994, 0.05, 0.2, "", "0.099x [0.050, 0.200]"),
        (0.00399, 0.00381, 0.00418, "", "0.0040x [0.0038, 0.0042]"),
        (0.5, 0.468, 0.533, "", "0.50x [0.47, 0.53]"),
        (1.0000012, 1.0000009, 1.0000016, "", "1.000001x [1.000001, 1.000002]"),
        (12.32, 11.92, 12.81, "", "12.3x [11.9, 12.8]"),
        (9.997, 9.94, 10.04, "", "10.0x [9.9, 10.0]"),
        (99.96, 95.0, 104.4, "", "100x [95, 104]"),
        (1297.3, 1200.9, 1401.4, "", "1,297x [1,201, 1,401]"),
        (120.0, 0.31, 46_000.0, "", "120.0x [0.3, 46,000.0]"),
        (0.5, 0.0004, 600.0, "", "0.5000x [0.0004, 600.0000]"),
        (3e-12, 2e-12, 4e-12, "", "3.0e-12x [2.0e-12, 4.0e-12]"),
        (1.0, 1.0, 1.0, "baseline", "1.00x"),
        (0.9, 0.72, 0.997, "", "0.900x [0.720, 0.997]"),
        (1.1, 1.0000001, 1.2, "", "1.1000000x [1.0000001, 1.2000000]"),
        (1.1, 1.0, 1.2, "", "1.10x [1.00, 1.20]"),
    ):
        assert text.ratio(value, low, high, claim) == shown
    for low, high in ((None, 1.2), (1.0, NAN), (None, None)):
        assert "[" not in text.ratio(1.1, low, high)
        assert text.ratio(1.1, low, high) != "1.10x"
    for speedup, figure in (
        (1.0, ""), (1.049, ""), (1 / 1.049, ""), (1.051, "1.1x"), (1 / 1.06, "0.94x"), (0.5, "0.50x"),
        (99.4, "99x"), (0.001, "0.0010x"), (1234.0, "1,234x"),
    ):  # fmt: skip
        assert [word for word in about(speedup).split() if word[-1:] == "x"] == [figure] * bool(
            figure
        )


def test_windows_that_are_twice_as_long_are_named() -> None:
    for own, other, is_told in (
        (1.0, 2.0, False),
        (1.0, 2.01, True),
        (2.01, 1.0, True),
        (NAN, 1.0, False),
    ):
        told = say("timed_apart", own=text.number(own, 2), whose="it", other=text.number(other, 2))
        assert timed_apart(own, other, "it") == (told if is_told else "")


def test_texts_are_cut_in_their_middle() -> None:
    assert [text.shortened("abcdefgh", n) for n in (8, 7, 6, 5, 2, 1)] == [
        "abcdefgh",
        "abc…fgh",
        "abc…gh",
        "ab…gh",
        "a…",
        "…",
    ]


def test_lists_of_values() -> None:
    assert text.tally(["measured", "out_of_memory", "measured", None]).split(", ")[:2] == [
        "2 measured", "1 out of memory",
    ]  # fmt: skip
    assert text.span([3, None, 5, 4], str) == "3 to 5"
    assert text.span([3, 3, NAN], str) == "3"
    assert text.span([], str) == ""
    table = DataFrame({"a": ["x", "y", None, "x", "z", "w"]})
    assert [text.distinct(table, "a", most) for most in (3, 4, 1)] == [
        "x, y, z and 1 more", "x, y, z, w", "x and 3 more",
    ]  # fmt: skip
    assert text.distinct(table[:2], "a") == "x, y"
    assert text.distinct(table, "b") == ""


def test_a_value_has_its_column_where_it_says_nothing_alone() -> None:
    for column, value, shown in (
        ("precision", "O1", "O1"), ("world_size", "8", "8 ranks"), ("world_size", "1", "1 rank"),
        ("resolution_px", "32", "32 px"), ("resolution_px", "", ""), ("mesh.ring", "2", "ring=2"),
        ("precision.gradient_dtype", "bfloat16", "gradient_dtype=bfloat16"), ("optimizer.momentum", "", ""),
        ("sharding", "none", "sharding=none"), ("seed", "3", "seed=3"), ("x", "0.5", "x=0.5"),
        ("x", "True", "x=True"), ("x", "False", "x=False"), ("x", "1.2.3", "1.2.3"), ("x", "", ""),
    ):  # fmt: skip
        assert text.value_label(column, value) == shown
    row = Series({"precision": "O1", "world_size": 8.0, "seed": None})
    assert text.cell_label(row, ["precision", "seed", "world_size", "other"]) == "O1 · 8 ranks"


def test_a_status_has_its_reason_and_its_flags() -> None:
    assert (
        text.status({"status": "out_of_memory", "reason": "no\n  room"}) == "out of memory: no room"
    )
    flags = {"oversubscribed": True, "throttled": False, "drifting": None}
    assert text.status({"status": "measured", **flags}) == "measured: oversubscribed"
    assert text.status({"status": "failed", "reason": "x", **flags}) == "failed: x; oversubscribed"
    assert text.status({"status": "measured", "reason": None}) == "measured"


def test_columns_of_text() -> None:
    table = DataFrame({
        "a": [1.0, NAN, 3.0, 0.5], "a_low": [0.5, 0.1, NAN, 0.1], "a_high": [2.0, 0.2, 4.0, NAN],
        "a_sd": [0.25, 0.5, NAN, 0.5], "b": [0.5, 0.25, None, 0.1], "b_sd": [0.01, None, 0.5, 0.02],
        "claim": ["faster", "", "", "baseline"],
    })  # fmt: skip
    assert text.values("a")(table) == ["1", "", "3", "0.5"]
    assert text.values("no")(table) == [""] * 4
    shown = text.with_interval("a", text.plain, text.plain)(table)
    assert shown == ["1 [0.5, 2]", "", "3", "0.5"]
    ends = text.with_interval("b", text.plain, text.plain, "a_{}")(table)
    assert ends == ["0.5 [0.5, 2]", "0.25 [0.1, 0.2]", "", "0.1"]
    assert text.with_interval("no", text.plain, text.plain)(table) == [""] * 4
    assert text.with_spread("a", text.plain)(table) == ["1 ± 0.25", "", "3", "0.5 ± 0.5"]
    assert text.with_spread("b", text.percent)(table) == [
        "50.0 ± 1.0 %",
        "25.0 %",
        "",
        "10.0 ± 2.0 %",
    ]
    assert text.with_spread("claim", text.plain)(table) == ["faster", "", "", "baseline"]
    assert text.ratios("a")(table)[0] == "1.00x [0.50, 2.00]"
    assert text.ratios("a")(table)[3] == "0.50x"
    kept = text.text_columns(
        table, {"A": text.values("a"), "N": text.values("no"), "M": text.values("no")}, ["M"]
    )
    assert list(kept) == ["A", "M"]
    assert text.text_rows(table[["a"]][:2]) == [{"a": "1"}, {"a": ""}]
    assert text.text_rows(table[[]]) == [{}] * 4


def test_a_table_in_markdown_and_csv() -> None:
    table = DataFrame(
        {"a|b": ["x|y", "=1+1"], "=n": ["-x", "-1"], "t": ["@a", "+.5"], "n": [-1.5, 2]}
    )
    lines = text.markdown(table).splitlines()
    assert lines[:3] == [
        "| a\\|b | =n | t | n |",
        "| --- | --- | --- | --- |",
        "| x\\|y | -x | @a | -1.5 |",
    ]
    assert text.csv_text(table).splitlines() == [
        "a|b,'=n,t,n", "x|y,'-x,'@a,-1.5", "'=1+1,-1,+.5,2.0",
    ]  # fmt: skip


def test_what_a_spreadsheet_would_compute_is_quoted_in_csv() -> None:
    """Also after blanks, in full-width forms, and where a digit follows the sign; numbers are not."""
    signs = "\t\r=@+-\uff1d\uff0b\uff0d\uff20"
    formulas = [f"{blank}{sign}a" for sign in signs for blank in ("", " ", "\u3000\xa0", "\n")]
    formulas += ["-2+3+cmd|' /C calc'!A0", "+1-1", "-", "=1", "\uff0d1", "-1e5x", "-1.2.3"]
    for value in formulas:
        assert text._no_formula(value) == f"'{value}", value
    for value in ("-1", " +.5", "-3.", "-1e-5", "+2E+3 ", "1-2", "a=b", "", " ", -1.5, None):
        assert text._no_formula(value) is value
