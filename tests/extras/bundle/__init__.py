import pytest

pytest.importorskip("vitsweep.extras.bundle")
pytest.importorskip("vitsweep.extras.compare")
