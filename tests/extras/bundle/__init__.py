import pytest

pytest.importorskip("vitsweep.extras.bundle")
