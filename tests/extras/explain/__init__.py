import pytest

pytest.importorskip("vitsweep.extras.explain")
pytest.importorskip("vitsweep.extras.compare")
