import pytest

pytest.importorskip("vitsweep.extras.curves")
