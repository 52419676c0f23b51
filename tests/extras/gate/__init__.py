import pytest

pytest.importorskip("vitsweep.extras.gate")
