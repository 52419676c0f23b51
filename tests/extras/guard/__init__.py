import pytest

pytest.importorskip("vitsweep.extras.guard")
