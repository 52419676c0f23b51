import pytest

pytest.importorskip("vitsweep.extras.race")
