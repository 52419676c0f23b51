import pytest

pytest.importorskip("vitsweep.extras.mirror")
