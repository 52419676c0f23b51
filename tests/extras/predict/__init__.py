import pytest

pytest.importorskip("vitsweep.extras.predict")
