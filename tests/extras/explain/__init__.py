import pytest

pytest.importorskip("vitsweep.extras.explain")
