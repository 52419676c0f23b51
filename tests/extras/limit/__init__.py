import pytest

pytest.importorskip("vitsweep.extras.limit")
