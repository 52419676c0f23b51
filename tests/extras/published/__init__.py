import pytest

pytest.importorskip("vitsweep.extras.published")
