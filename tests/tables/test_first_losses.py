"""A cell whose first losses or gradients leave those of its baseline is wrong."""

from pandas import DataFrame

from tests.builders import run, table
from tests.said import opening
from vitsweep.results.record import RunRecord
from vitsweep.tables.cells import cells
from vitsweep.tables.load import with_wrong_steps

BASE = {"fast": "base", "base": "base"}


def measured(cell_id: str, losses: tuple[float | None, ...], **validity: object) -> RunRecord:
    told = {"same_first_loss": "a", "same_losses": "b", "loss_tolerance": 1e-4}
    told |= {"gradient_tolerance": 1e-4} | validity
    named = {f"loss_step_{i + 1}": loss for i, loss in enumerate(losses)}
    return run(cell_id, metrics=named, validity=told)


def judged(*records: RunRecord) -> DataFrame:
    return with_wrong_steps(table(*records), BASE).set_index("cell_id")


PLAIN = (2.3, 2.2, 2.1)


def test_losses_are_compared_as_far_as_they_should_agree() -> None:
    for losses, validity, step in [
        (PLAIN, {}, 0),
        ((2.30001, 2.2003, 2.1003), {}, 0),
        ((2.3002, 2.2, 2.1), {}, 1),
        ((2.3, 2.201, 2.1), {}, 2),
        ((2.3, 2.2, 2.102), {}, 3),
        ((2.302, 2.2, 2.1), {"loss_tolerance": 0.05}, 0),
        ((2.3, 2.5, 2.9), {"same_losses": "another optimizer"}, 0),
        ((2.4, 2.5, 2.9), {"same_losses": "another optimizer"}, 1),
        ((2.4, 2.5, 2.9), {"same_losses": "other", "same_first_loss": "another batch"}, 0),
        ((2.3, None, None), {}, 0),
    ]:
        found = judged(measured("base", PLAIN), measured("fast", losses, **validity))
        assert found.loc["base", "status"] == "measured"
        assert found.loc["fast", "status"] == ("wrong" if step else "measured")
        if step:
            reason = found.loc["fast", "reason"]
            assert reason.startswith(opening("wrong", what=f"loss of step {step}"))


def test_without_any_baseline_nothing_is_compared() -> None:
    runs = table(measured("base", PLAIN), measured("fast", (9.0, 2.2, 2.1)))
    assert with_wrong_steps(runs, {})["status"].eq("measured").all()


SKETCH = "0.75 1.5 -2.25 0.5 3"


def test_gradients_are_compared_where_the_first_loss_is() -> None:
    for sketch, validity, reason in [
        (SKETCH, {}, ""),
        ("0.75005 1.50005 -2.25 0.5 3", {}, ""),
        (
            "0.75 1.504 -2.25 0.5 3",
            {},
            "differs from the baseline's in the same block by 0.002 of its size",
        ),
        ("0.75 1.504 -2.25 0.5 3", {"gradient_tolerance": 0.05}, ""),
        (
            "0.75 1.504 -2.25 0.5 3",
            {"same_losses": "other"},
            "by 0.002 of its size, where rounding",
        ),
        ("0.75 1.504 -2.25 0.5 3", {"same_losses": "other", "same_first_loss": "other"}, ""),
        ("0.76 1.5 -2.25 0.5 3", {}, "by 0.013 of its size"),
        ("0.76 1.5 -2.25 0.5 3", {"same_losses": "another clip_norm"}, ""),
        (None, {}, ""),
    ]:
        base = measured("base", PLAIN, first_gradients=SKETCH)
        found = judged(base, measured("fast", PLAIN, first_gradients=sketch, **validity)).loc[
            "fast"
        ]
        assert found["status"] == ("wrong" if reason else "measured")
        assert reason in found["reason"]
        assert not reason or found["reason"].startswith(opening("wrong", what="gradient of step 1"))


def test_only_runs_of_one_block_are_compared_and_the_cell_is_wrong_in_its_row() -> None:
    other = run("fast", block="b1", metrics={"loss_step_1": 9.0}, validity={"same_first_loss": "a"})
    runs = with_wrong_steps(
        table(measured("base", PLAIN), measured("fast", (9.0, 9.0, 9.0)), other), BASE
    )
    assert list(runs["status"]) == ["measured", "wrong", "measured"]
    alone = with_wrong_steps(
        table(measured("base", PLAIN), measured("fast", (9.0, 9.0, 9.0))), BASE
    )
    assert list(cells(alone, BASE)["status"]) == ["measured", "wrong"]


def test_runs_without_these_columns_stay_as_they_are() -> None:
    runs = table(run("base"), run("fast"))
    assert with_wrong_steps(runs, BASE) is runs
