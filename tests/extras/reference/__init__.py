import pytest

pytest.importorskip("vitsweep.extras.reference")
