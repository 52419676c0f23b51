"""The verdict as exit code, JSON and Markdown, and how much worse a quality is."""

import json
from math import inf, nan

import pytest

from vitsweep.extras.compare.comparison import compared
from vitsweep.extras.judge.verdict import Answer, Quality, Verdict, quality_of


def quality(name: str, low: float, high: float) -> Quality:
    return Quality(name=name, difference=0.0, low=low, high=high, blocks=5)


def test_a_quality_is_worse_where_its_whole_interval_is_on_the_bad_side() -> None:
    for low, high, loss_is_worse, accuracy_is_worse in (
        (-1.0, 1.0, False, False),
        (0.0, 1.0, False, False),
        (0.1, 1.0, True, False),
        (-1.0, 0.0, False, False),
        (-1.0, -0.1, False, True),
        (-inf, inf, False, False),
    ):
        for name in ("loss", "top1_error", "perplexity_last"):
            assert quality(name, low, high).is_worse is loss_is_worse
        assert quality("accuracy", low, high).is_worse is accuracy_is_worse
    assert "lower" in str(quality("loss", 0, 1))
    assert "higher" in str(quality("accuracy", 0, 1))
    assert "[" not in str(quality("loss", -inf, 1))
    assert "[" not in str(quality("loss", 0, inf))
    assert "[+0, +1]" in str(quality("loss", 0, 1))


def test_a_quality_has_an_interval_from_three_blocks_on() -> None:
    for differences, middle in (([0.5], 0.5), ([0.5, 0.7], 0.6)):
        found = quality_of("loss", differences)
        assert found.difference == pytest.approx(middle)
        assert (found.low, found.high, found.blocks) == (-inf, inf, len(differences))
    found = quality_of("loss", [0.5, 0.6, 0.7])
    assert found.low < found.difference < found.high < inf
    assert found.high - found.difference == pytest.approx(found.difference - found.low)


def test_the_exit_code_follows_from_the_answer() -> None:
    codes = {answer: int(Verdict(answer=answer, base="b", head="h").exit_code) for answer in Answer}
    assert codes == {
        "faster": 0, "slower": 1, "no difference shown": 0, "same code": 0, "wrong": 1, "worse": 1,
        "not proved": 4, "undecided": 4, "not measured": 3,
    }  # fmt: skip


def test_a_verdict_is_json_without_numbers_that_are_not_finite() -> None:
    few, known = compared([0.1, 0.2]), compared([0.1, 0.11, 0.12])
    verdict = Verdict(
        answer=Answer.faster, base="b", head="h", speed=known, repeated=few,
        quality=Quality(name="loss", difference=nan, low=-inf, high=2.5, blocks=2),
        facts={"more": 1}, notes=("One.",),
    )  # fmt: skip
    tree = json.loads(json.dumps(verdict.json()), parse_constant=pytest.fail)
    assert (tree["answer"], tree["exit_code"], tree["more"]) == ("faster", 0, 1)
    assert (tree["speed"]["low"], tree["speed"]["high"]) == (known.low, known.high)
    assert (tree["speed"]["blocks"], tree["speed"]["claim"]) == (3, str(known.claim))
    assert (tree["repeated"]["low"], tree["repeated"]["high"], tree["repeated"]["blocks"]) == (
        None,
        None,
        2,
    )
    assert tree["quality"] == {
        "name": "loss",
        "difference": None,
        "low": None,
        "high": 2.5,
        "blocks": 2,
    }
    assert tree["notes"] == ["One."]
    bare = Verdict(answer=Answer.wrong, base="b", head="h", speed=compared([])).json()
    assert (bare["speed"], bare["repeated"], bare["quality"]) == (None, None, None)


def test_text_of_a_candidate_is_no_markup() -> None:
    said = Verdict(
        answer=Answer.wrong, reason="it <b>\nlog *1*\n# 2", base="b", head="h"
    ).markdown()
    assert "- it &lt;b&gt;\n" in said
    assert said.endswith("\n\n    log *1*\n    # 2\n")
    assert "    " not in Verdict(answer=Answer.wrong, reason="it", base="b", head="h").markdown()
