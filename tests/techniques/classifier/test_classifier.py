from types import SimpleNamespace

import pytest

from tests.choices import choice
from tests.shapes import NANO
from vitsweep.errors import VitsweepError


def test_only_the_pooled_classifier_is_another_model():
    assert choice("classifier", "pooled").changes_model
    assert not choice("classifier", "token").changes_model


def test_pooled_is_taken_where_there_is_a_class_token():
    assert not list(choice("classifier", "pooled").conflicts(SimpleNamespace(model=NANO)))


@pytest.mark.parametrize(
    ("group", "name", "knob", "value"),
    [("classifier", "pooled", "pooling", "token"), ("layout", "batch_first", "batch_first", False)],
)
def test_a_choice_cannot_be_overridden_into_the_other(group, name, knob, value):
    with pytest.raises(VitsweepError, match=knob):
        choice(group, name, **{knob: value})
