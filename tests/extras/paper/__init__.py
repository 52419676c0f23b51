import pytest

pytest.importorskip("vitsweep.extras.paper")
