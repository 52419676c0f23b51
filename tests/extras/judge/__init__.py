import pytest

pytest.importorskip("vitsweep.extras.judge")
pytest.importorskip("vitsweep.extras.take_home")
