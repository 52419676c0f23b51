import pytest

pytest.importorskip("vitsweep.extras.judge")
