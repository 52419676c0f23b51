import pytest

from tests.sample_sweep import sweep
from vitsweep.errors import BadValueError
from vitsweep.tables.render import pick, sorted_by, where


@pytest.fixture
def cells():
    return sweep("scaling").cells


def test_rows_by_a_condition(cells):
    found = where(cells, "world_size == 4 and precision == 'O1'")
    assert set(found["world_size"]) == {4}
    assert set(found["precision"]) == {"O1"}


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("wrold_size == 4", "has no column `wrold_size`. Did you mean `world_size`"),
        ("world_size = 4", "is no condition"),
        ("world_size + 1", "is no condition"),
        ("world_size ==", "is no condition"),
        ("", "is no condition"),
        ("precision > 3", "is no condition"),
        ("world_size == 1024", "holds for no cell"),
    ],
)
def test_a_wrong_condition_is_refused_in_one_sentence(cells, condition, said):
    with pytest.raises(BadValueError) as refused:
        where(cells, condition)
    assert said in str(refused.value)
    assert condition in str(refused.value)


def test_the_best_value_of_a_metric_comes_first(cells):
    assert sorted_by(cells, "images_per_second")["images_per_second"].is_monotonic_decreasing
    assert sorted_by(cells, "step_time_ms")["step_time_ms"].is_monotonic_increasing
    assert sorted_by(cells, "world_size")["world_size"].is_monotonic_increasing


def test_an_order_is_turned_round_and_headings_name_columns(cells):
    turned = sorted_by(cells, "-img/s")["images_per_second"]
    assert turned.dropna().is_monotonic_increasing
    assert turned.isna().tail(turned.isna().sum()).all(), "rows without a value stay last"


def test_named_columns_are_shown_as_text_in_their_order(cells):
    found = pick(cells, ["world_size", "images_per_second"])
    assert list(found) == ["world_size", "images_per_second"]
    assert found["world_size"].iloc[0] == "1"
    assert len(found["images_per_second"].iloc[0].replace(".", "").replace(",", "")) == 4


@pytest.mark.parametrize("name", ["speed_up", "nothing_like_it", ""])
def test_an_unknown_column_is_refused_by_name(cells, name):
    for refused in (lambda: sorted_by(cells, name), lambda: pick(cells, ["cell_id", name])):
        with pytest.raises(BadValueError, match=f"has no column `{name}`"):
            refused()
