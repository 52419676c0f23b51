import pytest

pytest.importorskip("vitsweep.extras.doctor")
