import pytest

pytest.importorskip("vitsweep.extras.tune")
