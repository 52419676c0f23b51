"""Bars, whiskers, marks and their legend, at exact places."""

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from pandas import DataFrame

from vitsweep.charts import effects, style
from vitsweep.charts.bars import Bars, apart, stacked
from vitsweep.tables.effects import BASELINE

NAN = float("nan")
ROWS = DataFrame(
    [
        {"end": 2.0, "low": 1.5, "high": 2.5, "mark": 1.0, "start": 0.5, "a": 1.5, "b": 0.5},
        {"end": 1.0, "low": NAN, "high": NAN, "mark": 2.8, "start": NAN, "a": 1.0, "b": NAN},
        {"end": 0.5, "low": 0.4, "high": 10.0, "mark": NAN, "start": 0.25, "a": NAN, "b": 0.5},
        {"end": 0.2, "low": 0.1, "high": NAN, "mark": NAN, "start": 0.0, "a": 0.1, "b": 0.1},
        {"end": NAN, "low": NAN, "high": NAN, "mark": NAN, "start": NAN, "a": NAN, "b": NAN},
    ]
)


def drawn(rows: DataFrame = ROWS, **facts: Any) -> Axes:
    known = {"column": "end", "note": lambda row: f"{row['end']:g}", "grey": False}
    bars = Bars(**known | {"colour": lambda row: "#123456"} | facts)  # type: ignore[arg-type]
    [axes] = bars.draw(rows, [f"row {n}" for n in range(len(rows))]).axes
    return axes


def spans(axes: Axes) -> list[tuple[float, float]]:
    bars = [p for p in axes.patches if p.get_y() > -1]
    return [(round(p.get_x(), 9), round(p.get_x() + p.get_width(), 9)) for p in bars]


def whiskers(axes: Axes) -> list[list[float]]:
    paths = [segment for lines in axes.collections for segment in lines.get_segments()]
    return [[float(x) for x in path[:, 0]] for path in paths]


def legend(axes: Axes) -> list[str]:
    figure = axes.get_figure()
    return [t.get_text() for key in figure.legends for t in key.get_texts()] if figure else []


def test_a_bar_has_its_whisker_its_mark_and_its_value_behind_the_last_of_them() -> None:
    axes = drawn(low="low", high="high", mark="mark", marked="counted", reference=1.0)
    assert spans(axes) == [(0, 2), (0, 1), (0, 0.5), (0, 0.2), (0, 0)]
    assert whiskers(axes) == [pytest.approx(ends) for ends in ([1.5, 2.5], [0.4, 3.0])]
    assert axes.get_xlim() == pytest.approx((0, 1.05 * 3)), "1.5 times the longest bar"
    arrows = {tuple(a.get_xydata()[0]) for a in axes.lines if a.get_marker() == ">"}
    marks = {
        tuple(a.get_xydata()[0])
        for a in axes.lines
        if a.get_marker() == "o" and len(a.get_xydata())
    }
    assert arrows == {(3.0, 2.0)}
    assert marks == {(1.0, 0.0), (2.8, 1.0)}
    assert [text.xy[0] for text in axes.texts] == pytest.approx([2.5, 2.845, 3.0, 1.0, 1.0])
    assert [text.xy[1] for text in axes.texts] == [0, 1, 2, 3, 4]
    assert [text.get_text().partition(",")[0] for text in axes.texts] == [
        "2",
        "1",
        "0.5",
        "0.2",
        "nan",
    ]
    assert ["10" in text.get_text() for text in axes.texts] == [False, False, True, False, False]
    assert axes.get_ylim() == pytest.approx((4.6, -0.6))
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"row {n}" for n in range(5)]
    assert legend(axes) == ["counted"]
    dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    assert dashed == [1.0]


def test_without_whiskers_marks_or_a_reference_the_axis_ends_behind_the_longest_bar() -> None:
    axes = drawn()
    assert axes.get_xlim() == pytest.approx((0, 2.1))
    assert [text.xy[0] for text in axes.texts] == [2.0, 1.0, 0.5, 0.2, 0.0]
    assert (whiskers(axes), legend(axes), len(axes.lines)) == ([], [], 0)
    assert axes.get_xlabel() == "end"
    assert (
        drawn(column="step_time_ms", rows=ROWS.assign(step_time_ms=1.0)).get_xlabel()
        == "Step time (ms)"
    )
    assert drawn(label="mine").get_xlabel() == "mine"
    assert drawn(mark="mark").get_xlim()[1] == pytest.approx(1.05 * 2.8)
    assert drawn(ROWS[4:]).get_xlim() == pytest.approx((0, 1.05))
    assert drawn(ROWS[:0]).get_ylim() == pytest.approx((0.6, -0.6))


def test_a_whisker_never_turns_around() -> None:
    """An interval of another family may lie beside its bar."""
    beside = DataFrame({"end": [2.0, 2.0], "low": [2.25, 1.0], "high": [2.5, 1.5]})
    ends = [sorted(ends) for ends in whiskers(drawn(beside, low="low", high="high"))]
    assert ends == [pytest.approx([2.0, 2.5]), pytest.approx([1.0, 2.0])]


def test_bars_begin_at_their_start_and_are_stacked_from_their_parts() -> None:
    assert spans(drawn(start="start")) == [(0.5, 2), (0, 1), (0.25, 0.5), (0, 0.2), (0, 0)]
    parts = {"a": ("#aa0000", "A"), "b": ("#00bb00", "B")}
    axes = drawn(parts=parts)
    assert spans(axes) == [
        (0, 1.5), (0, 1), (0, 0), (0, 0.1), (0, 0), (1.5, 2), (1, 1), (0, 0.5), (0.1, 0.2), (0, 0),
    ]  # fmt: skip
    assert [to_hex(p.get_facecolor()) for p in axes.patches[::5]] == ["#aa0000", "#00bb00"]
    assert legend(axes) == ["A", "B"]


def test_a_bar_is_coloured_by_its_choice_and_grey_as_baseline() -> None:
    rows = DataFrame(
        {"end": [3.0, 2.0, 1.0], "precision": ["O1", "fp32", "O2"], "claim": ["", "baseline", ""]}
    )
    hues = [style.colour("precision", choice) for choice in rows["precision"]]

    def seen(rows: DataFrame = rows, **facts: Any) -> tuple[list[str], list[str]]:
        axes = drawn(rows, colour=None, group="precision", **facts)
        return [to_hex(p.get_facecolor()) for p in axes.patches[: len(rows)]], legend(axes)

    assert seen(grey=True) == ([hues[0], style.BASELINE, hues[2]], ["O1", "O2"])
    assert seen(grey=False) == (hues, ["O1", "fp32", "O2"])
    assert seen(rows[:2], grey=True) == ([hues[0], style.BASELINE], []), "one needs no legend"


def test_a_hatched_bar_is_explained_where_one_is_drawn() -> None:
    for sure, hatches, told in (
        ((True,) * 5, 0, []),
        ((True, False, True, True, True), 1, ["unsure"]),
        ((False,) * 5, 5, ["unsure"]),
        ((True, True, True, True, False), 1, []),
    ):
        axes = drawn(ROWS.assign(sure=sure), sure=lambda row: row["sure"], hatched="unsure")
        assert sum(bool(p.get_hatch()) for p in axes.patches[:5]) == hatches
        assert legend(axes) == told
    by = ROWS.assign(mark_by=["paper", "blog", None, None, None])
    assert [t.rpartition(" ")[2] for t in legend(drawn(by, mark="mark"))] == ["paper", "blog"]
    assert legend(drawn(ROWS[2:], mark="mark", marked="counted")) == []


def test_panels_are_as_high_as_their_bars() -> None:
    seen: list[tuple[list[int], list[float]]] = []
    figure = stacked(
        [ROWS, ROWS[3:]], lambda axes, part: seen.append((list(part.index), part["a"].tolist()[:1]))
    )
    assert [index for index, _ in seen] == [[0, 1, 2, 3, 4], [0, 1]]
    assert len(figure.axes) == 2
    assert figure.get_size_inches()[1] == pytest.approx(style.height(5) + style.height(2))
    top, below = (axes.get_position().height for axes in style.freeze_layout(figure).axes)
    assert 1.1 < top / below < 3


def test_names_lose_the_parts_that_all_have() -> None:
    assert apart(["O1 · ddp · 2", "O2 · ddp · 2", "O2 · ddp · 4"]) == ["O1 · 2", "O2 · 2", "O2 · 4"]
    assert apart(["O1 · ddp", "O1"]) == ["O1 · ddp", "O1"]
    assert apart(["O1 · ddp", "O2 · ddp"]) == ["O1", "O2"]
    assert apart([]) == []


def effect(kind: str, technique: str, given: str, value: float, **facts: Any) -> dict[str, Any]:
    ends = {"effect": value, "effect_low": value - 0.1, "effect_high": value + 0.1}
    row = {"kind": kind, "technique": technique, "given": given, "device": "cpu", "timed": ""}
    return row | ends | {"claim": "faster", "interaction": "", "ratio_to_average": NAN} | facts


def test_effects_show_their_averages_and_what_goes_with_another_choice() -> None:
    more, less = "more than on average", "less than on average"
    table = DataFrame(
        [
            effect("average", "precision=O1", "", 1.2),
            effect(
                "given",
                "precision=O1",
                "sharding=ddp",
                1.5,
                interaction=more,
                ratio_to_average=1.5,
            ),
            effect(
                "given",
                "precision=O1",
                "sharding=fsdp",
                0.7,
                interaction=less,
                ratio_to_average=0.6,
            ),
            effect("given", "precision=O1", "model=x", 3.0, interaction="", ratio_to_average=2.5),
            effect("average", "sharding=fsdp", "", 2.0, claim="no difference shown", timed="3 s"),
            effect("given", "sharding=fsdp", "precision=O1", 1.9),
            effect("average", "precision=O2", "", NAN),
        ]
    )
    [axes] = effects.draw(table).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["fsdp", "O1"]
    assert spans(axes)[:2] == [(0, 2.0), (0, 1.2)]
    assert [bool(p.get_hatch()) for p in axes.patches[:2]] == [True, False]
    told = [text.get_text() for text in axes.texts]
    assert told[0] == "2.00x [1.90, 2.10]\n3 s"
    assert told[1] == "1.20x [1.10, 1.30]; 1.50x [1.40, 1.60] with ddp"
    marks = [
        (float(x), float(y))
        for line in axes.lines if line.get_marker() == "o" for x, y in line.get_xydata()
    ]  # fmt: skip
    assert {*marks} == {(1.9, 0), (1.5, 1), (0.7, 1), (3.0, 1)}


def test_techniques_that_were_crossed_have_effects_to_draw() -> None:
    def crossed(*pairs: tuple[str, str, float]) -> list[str]:
        rows = [
            effect("average", technique, "", 1.0)
            for technique in dict.fromkeys(p[0] for p in pairs)
        ]
        rows += [effect("given", *pair) for pair in pairs]
        tables: Any = type("Tables", (), {"effects": DataFrame(rows)})
        found = effects.table_of(tables)
        return found.loc[found["kind"] == "average", "technique"].tolist() if len(found) else []

    a, b = "precision=O1", "sharding=fsdp"
    twice = ((a, "sharding=ddp", 1.0), (a, "sharding=fsdp", 1.0))
    other = ((b, "precision=O1", 1.0), (b, "precision=O2", 1.0))
    assert crossed(*twice, *other) == [a, b]
    assert crossed(*twice) == []
    assert crossed(*twice, other[0]) == []
    assert crossed(*twice, other[0], (b, "precision=O2", NAN)) == []
    assert crossed(*twice, other[0], (b, "model=x", 1.0)) == []
    assert crossed(*twice, (b, f"{BASELINE}=1", 1.0), (b, f"{BASELINE}=2", 1.0)) == []


def step(kind: str, position: int, added: str, speedup: float, **facts: Any) -> dict[str, Any]:
    ends = {"speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1, "claim": "faster"}
    gain = {"gain": 1.1, "gain_low": 1.0, "gain_high": 1.2, "gain_claim": "no difference shown"}
    row = {"baseline_cell_id": "b", "kind": kind, "position": position, "added": added}
    return row | ends | gain | {"speedup": speedup, "status": "measured", "timed": ""} | facts


def test_the_steps_of_a_waterfall_hang_on_one_another() -> None:
    table = DataFrame(
        [
            step("alone", 1, "precision=O1", 1.2),
            step("alone", 2, "sharding=fsdp", 1.5, claim="no difference shown"),
            step("alone", 3, "memory=offload", NAN, status="out_of_memory"),
            step("cumulative", 2, "sharding=fsdp", 1.6, timed="3 s"),
            step("cumulative", 0, BASELINE, 1.0, claim="baseline", gain=NAN, gain_claim="baseline"),
            step("cumulative", 1, "precision=O1", 1.2, gain_claim="faster"),
            step("alone", 1, "precision=O2", 9.0, baseline_cell_id="other"),
        ]
    )
    alone, added = effects.draw_steps(table).axes
    assert [t.get_text() for t in alone.get_yticklabels()] == ["fsdp", "O1", "offload"]
    assert [t.get_text() for t in added.get_yticklabels()] == [BASELINE, "+ O1", "+ fsdp"]
    assert spans(alone) == [(0, 1.5), (0, 1.2), (0, 0)]
    assert spans(added) == [(0, 1.0), (1.0, 1.2), (1.2, 1.6)]
    assert [bool(p.get_hatch()) for p in (*alone.patches[:2], *added.patches)] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert [text.get_text() for text in alone.texts] == [
        "1.50x [1.40, 1.60]", "1.20x [1.10, 1.30]", "out of memory",
    ]  # fmt: skip
    assert [text.get_text() for text in added.texts] == [
        "1.00x", "1.20x [1.10, 1.30], gain 1.10x [1.00, 1.20]",
        "1.60x [1.50, 1.70], gain 1.10x [1.00, 1.20]\n3 s",
    ]  # fmt: skip
    assert to_hex(added.patches[0].get_facecolor()) == style.BASELINE
    lone = table[3:6].assign(gain=NAN)
    [added] = effects.draw_steps(lone).axes
    assert [text.get_text() for text in added.texts][1:] == [
        "1.20x [1.10, 1.30]", "1.60x [1.50, 1.70]\n3 s",
    ]  # fmt: skip
    assert len(effects.draw_steps(table[:1]).axes) == 1
