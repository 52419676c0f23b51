import pytest

pytest.importorskip("vitsweep.extras.latex")
