import pytest

pytest.importorskip("vitsweep.extras.take_home")
