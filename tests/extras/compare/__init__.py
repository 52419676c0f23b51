import pytest

pytest.importorskip("vitsweep.extras.compare")
