"""Causes add up to the measured difference, in every block and in the table."""

import re
from dataclasses import replace

import numpy as np
import pytest
from pandas import DataFrame

from tests.builders import run as measured_run
from tests.said import opening
from tests.traced import traced
from vitsweep.errors import BadValueError
from vitsweep.extras.explain.causes import (
    REST,
    TRACING,
    Explanation,
    TracedRun,
    _late_rank,
    cause_text,
    explained,
    operator_text,
    traced_run,
)
from vitsweep.extras.explain.charts import causes as chart
from vitsweep.extras.explain.kernel_kinds import TimeClass
from vitsweep.tables.names import find_cell
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim

PRODUCTS, OPTIMIZER, HOST = (
    str(k) for k in (TimeClass.products, TimeClass.optimizer, TimeClass.host)
)
NAMES = ("adamw_foreach", "adamw_loop")


def run(step: float, plain: float, ms: dict[str, float], calls: int = 100) -> TracedRun:
    return TracedRun(
        step_ms=step,
        plain_ms=plain,
        operators={
            (kind, f"aten::{kind}", "[[8, 64]]"): np.array(
                [spent, calls if kind == OPTIMIZER else 1]
            )
            for kind, spent in ms.items()
        },
        images_per_second=16e3 / step,
        critical_rank=0,
        waited_ms=0.0,
    )


def pairs(blocks: int = 5) -> list[tuple[TracedRun, TracedRun]]:
    """A optimizer that is 8 ms faster, in blocks whose other times scatter."""
    random = np.random.default_rng(5)

    def one(optimizer: float, calls: int) -> TracedRun:
        a, b, c, d, e = random.normal(0, 0.2, 5)
        ms = {PRODUCTS: 20 + a, OPTIMIZER: optimizer + b, HOST: 5 + c}
        traced = sum(ms.values())
        return run(traced - 3 + d, traced - 3 + e, ms, calls)

    return [(one(4, 60), one(12, 1960)) for _ in range(blocks)]


def test_the_sum_closes_to_rounding_in_every_block() -> None:
    measured = pairs()
    found = explained(measured, NAMES)
    differences = [a.step_ms - b.step_ms for a, b in measured]
    assert found.blocks.sum(axis=1).to_numpy() == pytest.approx(differences, abs=1e-12)
    assert found.causes["ms"].sum() == pytest.approx(found.difference[0], abs=1e-12)
    assert found.causes["cause"].tolist()[-2:] == [TRACING, REST]


def test_the_sentence_names_what_is_shown_with_its_interval() -> None:
    found = explained(pairs(), NAMES)
    shown = found.causes.set_index("cause")["shown"]
    assert shown.to_dict() == dict.fromkeys(shown.index, False) | {OPTIMIZER: True}
    said = found.sentence
    assert said.startswith(opening("explained", a="adamw_foreach", b="adamw_loop") + "-")
    assert re.search(r" 5 blocks, faster; -\S+ ms \[[^;]*\] \w+\.$", said)
    still = [(replace(a, operators=b.operators), b) for a, b in pairs()]
    assert explained(still, NAMES).sentence.endswith("; no cause shown.")


def test_operators_are_ranked_by_their_difference_and_add_up_to_their_class() -> None:
    found = explained(pairs(), NAMES)
    rows, causes = found.operators, found.causes.set_index("cause")
    assert rows["class"].tolist()[0] == PRODUCTS or rows["class"].tolist()[0] == OPTIMIZER
    assert rows["ms"].abs().is_monotonic_decreasing
    for row in rows.to_dict("records"):
        assert row["ms"] == pytest.approx(causes.loc[row["class"], "ms"])
        assert row["low"] == pytest.approx(causes.loc[row["class"], "low"])
    optimizer = rows.set_index("class").loc[OPTIMIZER]
    assert (optimizer["a_calls"], optimizer["b_calls"]) == (60, 1960)
    text = operator_text(found, 2)
    assert len(text) == 2
    assert text["calls"].tolist().count("60 | 1,960") == 1
    assert found.json()["operators"][0]["operator"] == rows["operator"].iloc[0]


def test_a_late_rank_is_named_with_what_the_others_wait() -> None:
    waiting = str(TimeClass.ranks)
    late = [
        [0, 0, waiting, "gloo:all_reduce", "", 0, 7.0, 0.0],
        [1, 0, waiting, "gloo:all_reduce", "", 0, 0.5, 0.0],
        [1, 0, PRODUCTS, "aten::mm", "", 1, 20.0, 1.0],
        [2, 0, waiting, "gloo:all_reduce", "", 0, 9.0, 0.0],
    ]
    found = traced_run(traced(measured_run("aa"), late, 20.0, critical_rank=1))
    assert found
    found = replace(found, step_ms=20.0)
    assert (found.critical_rank, found.waited_ms) == (1, 8.0)
    assert _late_rank([found], "fsdp") == say("late_rank", name="fsdp", ms="8.00", which="rank 1")
    assert not _late_rank([replace(found, waited_ms=0.1)], "fsdp")


SHARES = {
    TimeClass.products: 40.0, TimeClass.attention: 15.0, TimeClass.elementwise: 12.0, TimeClass.copies: 5.0,
    TimeClass.optimizer: 8.0, TimeClass.host: 20.0, TimeClass.data: 0.5,
}  # fmt: skip


def drawn(random: np.random.Generator, blocks: int, more: float = 0.0) -> Explanation:
    """Equal cells of 100 ms a step, each class with noise of 3 % and of 0.2 ms, but `more` of casts in A."""

    def one(copies: float) -> TracedRun:
        noise = random.normal(0, 0.2, len(SHARES)) + random.normal(0, 0.03, len(SHARES)) * [
            *SHARES.values()
        ]
        ms = {str(k): v + e for (k, v), e in zip(SHARES.items(), noise, strict=True)}
        ms[TimeClass.copies] += copies
        return run(sum(ms.values()) - 3, sum(ms.values()) - 3 + random.normal(0, 0.2), ms)

    return explained([(one(more), one(0.0)) for _ in range(blocks)], ("A", "B"))


def names_a_cause(found: Explanation) -> bool:
    return bool(found.causes["shown"][:-2].any())


def test_equal_cells_rarely_show_a_cause_and_one_of_a_tenth_of_the_step_is_shown() -> None:
    random = np.random.default_rng(7)
    equal = [drawn(random, 5) for _ in range(200)]
    assert sum(map(names_a_cause, equal)) <= 16, "10 are expected at most; of 200 one in 20"
    for found in equal:
        assert names_a_cause(found) == ("no cause shown" not in found.sentence)
    planted = [drawn(random, 5, more=10.0) for _ in range(20)]
    assert all(" ms [" in f.sentence and TimeClass.copies in f.sentence for f in planted)
    small = planted[0].causes.set_index("cause").loc[TimeClass.data]
    assert small[["low", "high"]].isna().all(), "below 1 % of the step"


def test_below_five_blocks_the_largest_cause_is_named_as_not_shown() -> None:
    found = drawn(np.random.default_rng(1), 4, more=10.0)
    assert not names_a_cause(found)
    assert re.search(
        rf"largest cause, not shown below 5 blocks: \+\S+ ms {TimeClass.copies}\.$", found.sentence
    )


def test_two_blocks_have_no_interval_and_show_nothing() -> None:
    found = explained(pairs(2), NAMES)
    assert found.causes[["low", "high"]].isna().all(axis=None)
    assert not found.causes["shown"].any()
    assert re.search(rf"ms \(no interval\).* 2 blocks, {Claim.too_few_blocks}; ", found.sentence)
    assert found.json()["causes"][0]["low"] is None


def test_the_picture_has_the_difference_first_and_the_rest_last() -> None:
    found = explained(pairs(), NAMES)
    rows = chart.rows_of([found])
    assert rows["cause"].iloc[0] == "measured difference"
    assert rows["cause"].iloc[-1] == REST
    assert rows["ms"].iloc[1:].sum() == pytest.approx(rows["ms"].iloc[0])
    axes = chart.draw(rows).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == rows["cause"].tolist()
    assert [p.get_width() for p in axes.patches] == pytest.approx(rows["ms"].tolist())
    assert cause_text(found)["cause"].iloc[-1] == "measured difference"


CELLS = DataFrame(
    {
        "cell_id": ["aa", "bb", "cc", "dd"],
        "precision": ["fp32", "O2", "fp32", "O2"],
        "sharding": ["ddp", "ddp", "fsdp", "fsdp"],
        "model": "vit_nano",
        "baseline_cell_id": "aa",
    }
)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("cc", "cc"),
        ("O2 + fsdp", "dd"),
        ("baseline", "aa"),
        ("O2", "bb"),  # it changes least beside
        ("fp32", "aa"),
        ("sharding=fsdp", "cc"),
        ("fsdp precision=O2", "dd"),
    ],
)
def test_a_cell_is_named_by_id_name_or_settings(text: str, cell: str) -> None:
    assert find_cell(CELLS, text) == cell


def test_a_text_that_names_no_cell_or_several_is_refused_with_the_names() -> None:
    with pytest.raises(BadValueError, match=r"`O3`.*`O2 \+ fsdp`"):
        find_cell(CELLS, "O3")
    with pytest.raises(BadValueError, match="`vit_nano`"):
        find_cell(CELLS.assign(baseline_cell_id=None), "vit_nano")
