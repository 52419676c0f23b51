import pytest

from tests.sample_sweep import sweep
from vitsweep.errors import BadValueError
from vitsweep.tables.render import DIFFERENCE, named_columns, pick


@pytest.fixture
def cells():
    return sweep("scaling").cells


def test_named_columns_are_shown_as_text_in_their_order(cells):
    found = pick(cells, ["world_size", "images_per_second"])
    assert list(found) == ["world_size", "images_per_second"]
    assert found["world_size"].iloc[0] == "1"
    assert len(found["images_per_second"].iloc[0].replace(".", "").replace(",", "")) == 4


def test_a_heading_of_the_table_names_its_column(cells):
    cells = cells.assign(accuracy_claim="lower", accuracy_difference=0.1)
    columns = named_columns(cells, ["result", "note", "accuracy", DIFFERENCE, "img/s"])
    assert columns == [
        "claim",
        "speedup_note",
        "accuracy_claim",
        "accuracy_difference",
        "images_per_second",
    ]


@pytest.mark.parametrize("name", ["speed_up", "nothing_like_it", ""])
def test_an_unknown_column_is_refused_by_name(cells, name):
    with pytest.raises(BadValueError, match=f"`{name}`"):
        pick(cells, ["cell_id", name])
